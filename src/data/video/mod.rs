//! Random access to the frames of an H.264 MP4 file.
//!
//! A window is read by decoding from the nearest sync sample before it. A broken file gives an error that says which
//! way it is broken: `file_missing`, `not_openable`, `wrong_codec`, `too_short`, `decode_failed`.

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
    /// `file_missing`, `not_openable` (empty, cut off before its index, a Git LFS pointer, no MP4, corrupt boxes),
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

    /// Decodes these frames (numbers in display order, ascending).
    ///
    /// # Errors
    /// `too_short` if the file has fewer frames; `decode_failed` with the frame at which the bitstream broke;
    /// `wrong_size` if a picture has another size than the container says.
    pub fn read_frames(&mut self, frames: &[usize]) -> Result<Vec<Picture>> {
        debug_assert!(frames.is_sorted_by(|a, b| a < b));
        let Some(last) = frames.last() else { return Ok(Vec::new()) };
        if *last >= self.frame_count() {
            let (has, needs) = (self.frame_count(), last + 1);
            return Err(Error::data("too_short", format!("video has {has} frames, the window needs {needs}"))
                .at(&self.path)
                .hint("the clip must be left out, or the file copied again"));
        }
        let wanted_coded: Vec<usize> = frames.iter().map(|frame| self.table.shown[*frame]).collect();
        let earliest = wanted_coded.iter().min().copied().unwrap_or(0);
        let end = wanted_coded.iter().max().map_or(0, |index| index + 1);
        let start = self.table.samples[..=earliest].iter().rposition(|sample| sample.sync).unwrap_or(0);

        let (bytes, ranges) = self.read_samples(start, end)?;
        let samples: Vec<&[u8]> = ranges.into_iter().map(|range| &bytes[range]).collect();
        let mut fed: Vec<usize> = (start..end).collect();
        fed.sort_by_key(|index| self.table.samples[*index].composition);
        let wanted: Vec<bool> = fed.iter().map(|index| wanted_coded.contains(index)).collect();
        let pictures = decoder::decode(&self.table.parameter_sets, self.table.nal_length_size, &samples, &wanted)
            .map_err(|fault| self.decode_failed(start, fault))?;
        let (height, width) = self.size();
        for picture in &pictures {
            if (picture.height, picture.width) != (height, width) {
                let (got_width, got_height) = (picture.width, picture.height);
                let what = format!("a picture is {got_width}x{got_height}, its container says {width}x{height}");
                return Err(Error::data("wrong_size", what).at(&self.path));
            }
        }
        Ok(pictures)
    }

    /// The bytes of samples `start..end` and where each one lies in them. Read one by one: their places in the file
    /// are the file's claim, so no claim may decide how much memory is taken beyond a sample's own size.
    fn read_samples(&mut self, start: usize, end: usize) -> Result<(Vec<u8>, Vec<std::ops::Range<usize>>)> {
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

    fn decode_failed(&self, start: usize, fault: Fault) -> Error {
        let what = match fault {
            Fault::Sample { fed, why } => {
                let coded = start + fed;
                match self.table.shown.iter().position(|index| *index == coded) {
                    Some(frame) => format!("frame {frame} cannot be decoded: {why}"),
                    None => format!("coded picture {coded} cannot be decoded: {why}"),
                }
            }
            Fault::Count { fed, pictures } => {
                let frame = self.table.shown.iter().position(|index| *index == start).unwrap_or(0);
                format!("from frame {frame} on, {fed} coded frames gave {pictures} pictures")
            }
            Fault::Decoder(why) => format!("the H.264 decoder failed: {why}"),
        };
        Error::data("decode_failed", what).at(&self.path).hint("copy the file again from its source")
    }
}
