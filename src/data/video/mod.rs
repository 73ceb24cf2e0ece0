//! Random access to the frames of an H.264 MP4 file.
//!
//! A window is read by decoding from the nearest sync sample before it. A broken file gives an error that says which
//! way it is broken: `file_missing`, `lfs_pointer`, `not_openable`, `wrong_codec`, `too_short`, `decode_failed`.

mod color;
mod container;
mod decoder;

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::{Error, Result};
use container::SampleTable;
use decoder::Fault;

/// One decoded picture, YUV 4:2:0, planes without padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels.
    pub width: usize,
    pub height: usize,
    /// [height, width]
    pub y: Vec<u8>,
    /// [ceil(height / 2), ceil(width / 2)]
    pub u: Vec<u8>,
    pub v: Vec<u8>,
}

impl Picture {
    /// Appends red, green and blue plane, each [height, width] (BT.601, limited range).
    pub fn append_rgb_planes(&self, rgb: &mut Vec<u8>) {
        color::append_rgb_planes(self, rgb);
    }
}

/// Why some frames cannot be had, and the frame at which the bitstream broke, if one can be named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameFault {
    pub error: Error,
    pub frame: Option<usize>,
}

impl From<Error> for FrameFault {
    fn from(error: Error) -> Self {
        Self { error, frame: None }
    }
}

/// An open video file whose frame table is known; frames are decoded on demand.
#[derive(Debug)]
pub struct VideoFile {
    path: PathBuf,
    file: File,
    table: SampleTable,
}

impl VideoFile {
    /// Opens a file and reads its frame table; decodes nothing.
    ///
    /// # Errors
    /// `file_missing`, `lfs_pointer`, `not_openable` (empty, cut off before its index, no MP4, corrupt boxes),
    /// `wrong_codec`.
    pub fn open(path: &Path) -> Result<Self> {
        // Asked first: opening a named pipe would wait for its writer.
        if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            return Err(Error::data("not_openable", "video cannot be opened: it is no regular file").at(path));
        }
        let mut file = File::open(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::data("file_missing", "video file is missing").at(path),
            _ => Error::data("not_openable", format!("video cannot be opened: {error}")).at(path),
        })?;
        let table = container::read(&mut file, path)?;
        Ok(Self { path: path.to_owned(), file, table })
    }

    /// Frames the container shows, after its edit list.
    pub fn frame_count(&self) -> usize {
        self.table.shown.len()
    }

    /// (height, width) in pixels, as the container states it.
    pub fn size(&self) -> (usize, usize) {
        (self.table.height, self.table.width)
    }

    /// The first frame that is shown half a frame or more away from where this rate puts it, and its time in seconds
    /// after the first one's. A frame number then names another instant than in the rows.
    pub fn frame_out_of_time(&self, fps: f64) -> Option<(usize, f64)> {
        let time = |index: usize| self.table.samples[index].composition as f64 / f64::from(self.table.timescale);
        let first = time(*self.table.shown.first()?);
        let seconds = self.table.shown.iter().map(|index| time(*index) - first);
        // A time that is no number is not in time.
        let in_time = |frame: usize, seconds: f64| (seconds * fps - frame as f64).abs() < 0.5;
        seconds.enumerate().find(|(frame, seconds)| !in_time(*frame, *seconds))
    }

    /// Decodes these frames (numbers in display order, ascending).
    ///
    /// # Errors
    /// `too_short` if the file has fewer frames; `decode_failed` with the frame at which the bitstream broke;
    /// `wrong_size` if a picture has another size than the container says.
    pub fn read_frames(&mut self, frames: &[usize]) -> Result<Vec<Picture>> {
        let mut pictures = Vec::with_capacity(frames.len());
        self.visit(frames, &mut |picture| pictures.push(picture)).map_err(|fault| fault.error)?;
        Ok(pictures)
    }

    /// For each window, what [`VideoFile::read_frames`] would say of it. A sound file is decoded once, however many
    /// windows overlap. `see` is shown the pictures, those of a broken file perhaps more than once; none is kept.
    pub(super) fn check_windows(
        &mut self,
        windows: &[Vec<usize>],
        see: &mut dyn FnMut(Picture),
    ) -> Vec<Result<(), FrameFault>> {
        let mut all: Vec<usize> = windows.iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        if windows.len() > 1 && self.restarts_anywhere(&all) && self.visit(&all, see).is_ok() {
            return windows.iter().map(|_| Ok(())).collect();
        }
        windows.iter().map(|window| self.visit(window, see)).collect()
    }

    /// Whether a decoder that comes from before a sync sample is in the state of a new one there, for all sync samples
    /// behind these frames: then frames that decode in one go decode from each of them. So every sync sample must
    /// be an IDR picture, and no sample may bring parameter sets but those that a new decoder is given.
    fn restarts_anywhere(&mut self, frames: &[usize]) -> bool {
        const IDR: u8 = 5;
        const PARAMETER_SETS: std::ops::RangeInclusive<u8> = 7..=8;
        let Ok(span) = self.span(frames) else { return false };
        let Ok((bytes, ranges)) = self.read_samples(span.start, span.end) else { return false };
        let kind = |unit: &[u8]| unit.first().map_or(0, |byte| byte & 0x1f);
        span.zip(ranges).all(|(index, range)| {
            let mut has_idr = false;
            let known = decoder::units(&bytes[range], self.table.nal_length_size).all(|unit| {
                has_idr |= kind(unit) == IDR;
                !PARAMETER_SETS.contains(&kind(unit)) || self.table.parameter_sets.iter().any(|set| set == unit)
            });
            known && (has_idr || !self.table.samples[index].sync)
        })
    }

    /// The samples that have to be fed for some frames: from the nearest sync sample before them.
    fn span(&self, frames: &[usize]) -> Result<std::ops::Range<usize>, FrameFault> {
        let last = frames.last().copied().unwrap_or(0);
        if last >= self.frame_count() {
            let (has, needs) = (self.frame_count(), last + 1);
            let error = Error::data("too_short", format!("video has {has} frames, the window needs {needs}"))
                .at(&self.path)
                .hint("the clip must be left out, or the file copied again");
            return Err(FrameFault { error, frame: None });
        }
        let coded = || frames.iter().map(|frame| self.table.shown[*frame]);
        let earliest = coded().min().unwrap_or(0);
        let end = coded().max().map_or(0, |index| index + 1);
        let start = self.table.samples[..=earliest].iter().rposition(|sample| sample.sync).unwrap_or(0);
        Ok(start..end)
    }

    /// Decodes these frames (ascending) one after the other; those before a fault come too.
    fn visit(&mut self, frames: &[usize], each: &mut dyn FnMut(Picture)) -> Result<(), FrameFault> {
        debug_assert!(frames.is_sorted_by(|a, b| a < b));
        if frames.is_empty() {
            return Ok(());
        }
        let std::ops::Range { start, end } = self.span(frames)?;
        let (bytes, ranges) = self.read_samples(start, end)?;
        let samples: Vec<&[u8]> = ranges.into_iter().map(|range| &bytes[range]).collect();
        let mut fed: Vec<usize> = (start..end).collect();
        fed.sort_by_key(|index| self.table.samples[*index].composition);
        let mut is_wanted = vec![false; end - start];
        for frame in frames {
            is_wanted[self.table.shown[*frame] - start] = true;
        }
        let wanted: Vec<bool> = fed.iter().map(|index| is_wanted[index - start]).collect();
        let (height, width) = self.size();
        let mut odd = None;
        let mut sized = |picture: Picture| {
            if (picture.height, picture.width) != (height, width) {
                odd.get_or_insert((picture.height, picture.width));
            }
            each(picture);
        };
        decoder::decode(&self.table.parameter_sets, self.table.nal_length_size, &samples, &wanted, &mut sized)
            .map_err(|fault| self.decode_failed(start, fault))?;
        match odd {
            None => Ok(()),
            Some((got_height, got_width)) => {
                let what = format!("a picture is {got_width}x{got_height}, its container says {width}x{height}");
                Err(FrameFault { error: Error::data("wrong_size", what).at(&self.path), frame: None })
            }
        }
    }

    /// The bytes of samples `start..end` and where each one lies in them. Read one by one: their places in the file
    /// are the file's claim, so no claim may decide how much memory is taken beyond a sample's own size.
    fn read_samples(&mut self, start: usize, end: usize) -> Result<(Vec<u8>, Vec<std::ops::Range<usize>>), FrameFault> {
        let mut bytes = Vec::new();
        let mut ranges = Vec::with_capacity(end - start);
        for index in start..end {
            let sample = self.table.samples[index];
            let from = bytes.len();
            let read = self
                .file
                .seek(SeekFrom::Start(sample.offset))
                .and_then(|_| (&mut self.file).take(u64::from(sample.size)).read_to_end(&mut bytes));
            match read {
                Ok(count) if count == sample.size as usize => ranges.push(from..bytes.len()),
                Ok(_) => {
                    let why = "its data lie beyond the end of the file, which was cut off".to_string();
                    return Err(self.decode_failed(start, Fault::Sample { fed: index - start, why }));
                }
                Err(error) => {
                    let why = format!("it cannot be read: {error}");
                    return Err(self.decode_failed(start, Fault::Sample { fed: index - start, why }));
                }
            }
        }
        Ok((bytes, ranges))
    }

    fn decode_failed(&self, start: usize, fault: Fault) -> FrameFault {
        let shown_at = |coded: usize| self.table.shown.iter().position(|index| *index == coded);
        let (frame, what) = match fault {
            Fault::Sample { fed, why } => {
                let coded = start + fed;
                match shown_at(coded) {
                    Some(frame) => (Some(frame), format!("frame {frame} cannot be decoded: {why}")),
                    None => (None, format!("coded picture {coded} cannot be decoded: {why}")),
                }
            }
            Fault::Count { fed, pictures } => {
                let frame = shown_at(start).unwrap_or(0);
                (Some(frame), format!("from frame {frame} on, {fed} coded frames gave {pictures} pictures"))
            }
            Fault::Decoder(why) => (None, format!("the H.264 decoder failed: {why}")),
        };
        let error = Error::data("decode_failed", what).at(&self.path).hint("copy the file again from its source");
        FrameFault { error, frame }
    }
}
