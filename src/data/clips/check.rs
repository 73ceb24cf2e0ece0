//! Every clip of an episode as [`Dataset::load`] would read it, each file opened and each video decoded once.

use super::{ClipId, Dataset, Episode, cut, span};
use crate::data::validate::{Bound, Checked, Finding, Inputs, MeanColour, Recording, Source, Unit};
use crate::data::video::FrameFault;
use crate::data::{lerobot::Metadata, views};
use crate::{Error, Result};

impl Source for Dataset {
    type Id = ClipId;

    fn recordings(&self) -> Vec<Recording<ClipId>> {
        let recording = |episode: &Episode| {
            let held_out = self.config.validation_episodes.contains(&episode.index);
            let unit = |id| Unit { id, side: if held_out { "validation" } else { "train" }, left_out: None };
            Recording { dataset: 0, episode: episode.index, units: cut(episode, &self.config).map(unit).collect() }
        };
        self.episodes.iter().map(recording).filter(|recording| !recording.units.is_empty()).collect()
    }

    fn datasets(&self) -> Vec<&Metadata> {
        vec![&self.metadata]
    }

    fn views(&self) -> &[String] {
        &self.config.views
    }

    fn inputs(&self, recording: &Recording<ClipId>) -> Result<Inputs> {
        let (config, metadata) = (&self.config, &self.metadata);
        let index = recording.episode;
        let episode = self.episode(index).ok_or_else(|| self.unknown_clip())?;
        let mut records = format!(
            "clips {:?} frames {} skip {} stride {} action skip {} robot {:?} size {:?} fps {} length {} fault {:?}\n",
            config.views,
            config.frames,
            config.frame_skip,
            config.clip_stride,
            self.action_skip,
            config.robot,
            self.size,
            metadata.fps,
            episode.length,
            episode.rows.as_ref().err().map(|error| error.code),
        );
        let mut others = vec![metadata.data_file(index)?];
        if let Some(cache) = self.geometry_in_use() {
            records.push_str(&format!("geometry {:?}\n", cache.info()));
            others.push(cache.file(index));
        }
        let videos = config.views.iter().map(|view| metadata.video_file(view, index)).collect::<Result<_>>()?;
        Ok(Inputs { records, videos, others })
    }

    /// In the order in which [`Dataset::load`] reads, so that the first fault is the same.
    fn check(&self, recording: &Recording<ClipId>) -> Checked {
        let tokens = self.geometry_in_use().map(|cache| cache.open_file(recording.episode));
        let numbers = |unit: &Unit<ClipId>| {
            let row = || match &tokens {
                None => Ok(None),
                Some(Ok(file)) => file.row(unit.id.start).map(Some),
                Some(Err(error)) => Err(error.clone()),
            };
            self.numbers(&unit.id, row).map(drop).map_err(FrameFault::from)
        };
        let mut verdicts: Vec<Result<(), FrameFault>> = recording.units.iter().map(numbers).collect();
        let mut colours = vec![MeanColour::default(); self.config.views.len()];
        for (view, colour) in self.config.views.iter().zip(&mut colours) {
            let frames = |at: usize| self.frame_numbers(&recording.units[at].id);
            let open = || views::open(&self.metadata, view, recording.episode, self.size);
            views::check(&mut verdicts, frames, open, colour);
        }
        Checked { verdicts, warnings: Vec::new(), colours }
    }

    fn findings(&self) -> Vec<Finding> {
        let needed = span(&self.config) + 1;
        let file = self.metadata.root.join("meta/episodes.jsonl");
        let short = self.episodes.iter().filter(|episode| episode.length < needed).map(|episode| {
            let what = format!("episode {} has {} frames, a clip needs {needed}", episode.index, episode.length);
            Finding::warning(Error::data("too_short", what).at(&file))
        });
        short.chain(self.episodes.iter().flat_map(|episode| self.far_values(episode))).collect()
    }
}

impl Dataset {
    /// Columns of poses and actions whose values lie far outside what the training episodes have.
    fn far_values(&self, episode: &Episode) -> Vec<Finding> {
        let Ok(rows) = &episode.rows else { return Vec::new() };
        let statistics = &self.statistics;
        let position = statistics.position.iter().enumerate().map(|(axis, range)| (axis, *range));
        let poses = position.chain([(7, statistics.gripper)]).map(|(column, range)| {
            Bound::of(range).exceeded("pose", column, rows.poses.iter().map(|row| f64::from(row[column])), 0)
        });
        let ranges = statistics.action_position.iter().chain(&statistics.action_axis_angle);
        let actions = ranges.enumerate().map(|(column, range)| {
            Bound::of(*range).exceeded("action", column, rows.actions.iter().map(|row| f64::from(row[column])), 0)
        });
        let path = self.metadata.data_file(episode.index);
        let place = |error: Error| path.as_ref().map_or(error.clone(), |path| error.clone().at(path));
        poses.chain(actions).flatten().map(|error| Finding::warning(place(error))).collect()
    }
}
