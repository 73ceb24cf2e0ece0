//! Every sample of an episode as [`EpisodeSet::load`] would read it without a cache, up to the codec: each video is
//! opened and decoded once.

use super::index::Sample;
use super::load::video_frames;
use super::{EpisodeId, EpisodeSet};
use crate::config::LatentSource;
use crate::data::Range;
use crate::data::lerobot::Metadata;
use crate::data::validate::{Bound, Checked, Finding, Inputs, MeanColour, Recording, Reject, Source, Unit};
use crate::data::video::FrameFault;
use crate::data::views;
use crate::{Error, Result};
use std::collections::BTreeMap;

impl Source for EpisodeSet {
    type Id = EpisodeId;

    fn recordings(&self) -> Vec<Recording<EpisodeId>> {
        let mut units = BTreeMap::new();
        for sample in &self.index.samples {
            units.insert(sample.id, None);
        }
        for excluded in &self.index.excluded {
            if let Ok(id) = excluded.what.parse::<EpisodeId>() {
                let error = Error::data(excluded.code, &excluded.reason).at(&excluded.path);
                units.insert(id, Some(Reject::of(&error.into())));
            }
        }
        let mut recordings: Vec<Recording<EpisodeId>> = Vec::new();
        for (id, left_out) in units {
            let held_out = self.config.validation_episodes.contains(&id.episode);
            let unit = Unit { id, side: if held_out { "validation" } else { "train" }, left_out };
            let (dataset, episode) = (id.dataset.unwrap_or(0) as usize, id.episode);
            match recordings.last_mut() {
                Some(last) if (last.dataset, last.episode) == (dataset, episode) => last.units.push(unit),
                _ => recordings.push(Recording { dataset, episode, units: vec![unit] }),
            }
        }
        recordings
    }

    fn datasets(&self) -> Vec<&Metadata> {
        self.index.datasets.iter().collect()
    }

    fn views(&self) -> &[String] {
        &self.config.views
    }

    fn inputs(&self, recording: &Recording<EpisodeId>) -> Result<Inputs> {
        let (config, metadata) = (&self.config, &self.index.datasets[recording.dataset]);
        let length = metadata.episode(recording.episode).map_or(0, |record| record.length);
        let mut records = format!(
            "episodes {:?} tile {:?} {:?} latents {:?} stride {} actions {:?} dims {} text {} {} {} fps {} length {length}\n",
            config.views,
            config.tile,
            self.layout,
            config.latents,
            config.frame_stride,
            config.actions,
            self.action_dim,
            self.text_in_files,
            self.text_len,
            self.text_dim,
            metadata.fps,
        );
        let (mut videos, mut others) = (Vec::new(), vec![metadata.data_file(recording.episode)?]);
        if config.latents == LatentSource::Videos {
            videos =
                config.views.iter().map(|view| metadata.video_file(view, recording.episode)).collect::<Result<_>>()?;
        }
        for unit in &recording.units {
            let frames = self.index.sample(unit.id).map_or(0, |sample| sample.frames);
            records.push_str(&format!("unit {:?} {frames} {:?}\n", unit.id.segment, unit.left_out.is_some()));
            if let (LatentSource::Official, Ok(sample)) = (config.latents, self.index.sample(unit.id)) {
                for view in &config.views {
                    others.push(self.index.latent_file(sample, view)?);
                }
            }
        }
        Ok(Inputs { records, videos, others })
    }

    /// In the order in which [`EpisodeSet::load`] reads, so that the first fault is the same.
    fn check(&self, recording: &Recording<EpisodeId>) -> Checked {
        let samples: Vec<Result<&Sample>> = recording.units.iter().map(|unit| self.index.sample(unit.id)).collect();
        let mut verdicts: Vec<Result<(), FrameFault>> =
            samples.iter().map(|sample| sample.as_ref().map(drop).map_err(|error| error.clone().into())).collect();
        let mut colours = vec![MeanColour::default(); self.config.views.len()];
        if self.config.latents == LatentSource::Videos {
            for (view, colour) in colours.iter_mut().enumerate() {
                let frames = |at: usize| match &samples[at] {
                    Ok(sample) => self.frame_numbers(sample, 0..video_frames(sample.frames)),
                    Err(_) => Vec::new(),
                };
                let Some(sample) = samples.iter().flatten().next() else { break };
                let open = || self.open_view(sample, view).map(|(video, _)| video);
                views::check(&mut verdicts, frames, open, colour);
            }
        }
        let mut warnings = Vec::new();
        for (sample, verdict) in samples.iter().zip(&mut verdicts) {
            if let (Ok(sample), Ok(())) = (sample, &verdict) {
                match self.check_numbers(sample) {
                    Ok(found) => warnings.extend(found),
                    Err(error) => *verdict = Err(error.into()),
                }
            }
        }
        Checked { verdicts, warnings, colours }
    }

    fn findings(&self) -> Vec<Finding> {
        Vec::new()
    }
}

impl EpisodeSet {
    /// Latent files where they are the source, text and actions of a sample; what is worth a warning.
    fn check_numbers(&self, sample: &Sample) -> Result<Vec<Finding>> {
        let (first_frame, text) = match self.config.latents {
            LatentSource::Videos => (sample.start, None),
            LatentSource::Official => {
                let published = self.read_files(sample)?;
                (published.first_frame, published.text)
            }
        };
        if text.is_none() {
            self.text.rows(&sample.prompt)?;
        }
        let rows = self.action_rows(sample, first_frame)?;
        self.channels(sample, &rows)?;
        let metadata = &self.index.datasets[sample.dataset];
        let path = metadata.data_file(sample.id.episode)?;
        let ranges = self.config.actions.q01.iter().zip(&self.config.actions.q99);
        let far = ranges.enumerate().filter_map(|(column, (q01, q99))| {
            let values = rows.values.iter().skip(column).step_by(rows.width.max(1)).copied();
            Bound::of(Range { q01: *q01, q99: *q99 }).exceeded("action", column, values, first_frame)
        });
        let mut found: Vec<Finding> = far.map(|error| Finding::warning(error.at(&path))).collect();
        if sample.frames == 1 {
            let what = format!("{} has {} frames, which make one latent frame", sample.id, sample.end - sample.start);
            found.push(Finding::warning(Error::data("too_short", what).at(metadata.root.join("meta/episodes.jsonl"))));
        }
        Ok(found)
    }
}
