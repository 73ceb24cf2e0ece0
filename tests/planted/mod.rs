//! A copy of the tiny dataset, and the ways to break it.
#![allow(dead_code)] // each test file uses its own part

use crate::recipes;
use lbva_tui::Error;
use lbva_tui::config::{DataConfig, ModelConfig};
use lbva_tui::data::{ClipId, Dataset};
use parquet::data_type::{DoubleType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub const PARQUET: &str = "data/chunk-000/episode_000002.parquet";
pub const VIDEO: &str = "videos/chunk-000/observation.images.eye_in_hand_rgb/episode_000002.mp4";
pub const TOKENS: &str = "geometry/chunk-000/episode_000002.safetensors";
pub const LFS: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n";

/// A copy of the tiny dataset to break.
pub struct Broken {
    pub folder: tempfile::TempDir,
    pub config: DataConfig,
    pub model: ModelConfig,
}

impl Broken {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        copy(&recipes::repository("tests/data/robosuite_tiny_v21"), folder.path());
        let config = recipes::data(folder.path(), &[1]);
        Self { folder, config, model: recipes::model(true) }
    }

    pub fn path(&self, part: &str) -> PathBuf {
        self.folder.path().join(part)
    }

    pub fn write(&self, part: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(part), bytes).unwrap();
    }

    pub fn read(&self, part: &str) -> Vec<u8> {
        std::fs::read(self.path(part)).unwrap()
    }

    pub fn replace(&self, part: &str, from: &str, to: &str) {
        let text = String::from_utf8(self.read(part)).unwrap();
        assert!(text.contains(from), "{part} has no {from}");
        self.write(part, text.replacen(from, to, 1));
    }

    pub fn open_error(&self) -> Error {
        one_line(Dataset::open(&self.config, &self.model).unwrap_err())
    }

    /// The dataset opens; this clip fails.
    pub fn load_error(&self, episode: usize, start: usize) -> Error {
        let dataset = Dataset::open(&self.config, &self.model).unwrap();
        let clip = ClipId { episode, start };
        let error = one_line(dataset.load(&clip).unwrap_err());
        assert!(error.what.starts_with(&clip.to_string()), "the message names the clip: {error}");
        error
    }
}

pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => std::fs::write(target, std::fs::read(entry.path()).unwrap()).unwrap(),
        }
    }
}

pub fn one_line(error: Error) -> Error {
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    error
}

/// Writes columns of a schema without arrow: state and action rows of `width` values, `NaN` where told.
pub fn parquet(path: &Path, rows: usize, state_width: usize, action_width: usize, poison: Option<(usize, f64)>) {
    let times: Vec<f64> = (0..rows).map(|row| row as f64 / 20.0).collect();
    parquet_at(path, &times, state_width, action_width, poison);
}

/// The same with these timestamps, a row each.
pub fn parquet_at(path: &Path, times: &[f64], state_width: usize, action_width: usize, poison: Option<(usize, f64)>) {
    let rows = times.len();
    let schema = "message schema {
        REQUIRED GROUP observation.state (LIST) { REPEATED GROUP list { REQUIRED DOUBLE element; } }
        REQUIRED GROUP action (LIST) { REPEATED GROUP list { REQUIRED DOUBLE element; } }
        REQUIRED INT64 task_index;
        REQUIRED DOUBLE timestamp;
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(WriterProperties::builder().build())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for width in [state_width, action_width] {
        let mut values: Vec<f64> = (0..rows * width).map(|value| (value % 17) as f64 / 17.0).collect();
        if let (Some((at, value)), true) = (poison, width == action_width) {
            values[at] = value;
        }
        let repetitions: Vec<i16> = (0..rows * width).map(|at| i16::from(at % width != 0)).collect();
        let definitions = vec![1; rows * width];
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<DoubleType>().write_batch(&values, Some(&definitions), Some(&repetitions)).unwrap();
        column.close().unwrap();
    }
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&vec![1; rows], None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<DoubleType>().write_batch(times, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

pub fn replace_bytes(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut changed = bytes.to_vec();
    let mut found = 0;
    for at in 0..bytes.len() - from.len() {
        if bytes[at..].starts_with(from) {
            changed[at..at + to.len()].copy_from_slice(to);
            found += 1;
        }
    }
    assert!(found > 0);
    changed
}

/// Where the last box of this kind starts (`ftyp` names avc1 too); the names do not occur in the coded pictures.
pub fn find_box(bytes: &[u8], kind: &[u8; 4]) -> usize {
    bytes.windows(4).rposition(|window| window == kind).unwrap() - 4
}

/// moov in front of mdat, as `-movflags faststart` does.
pub fn faststart(bytes: &[u8]) -> Vec<u8> {
    let (moov, mdat) = (find_box(bytes, b"moov"), find_box(bytes, b"mdat"));
    assert!(mdat < moov);
    let mut index = bytes[moov..].to_vec();
    let chunks = find_box(&index, b"stco") + 16;
    let count = u32::from_be_bytes(index[chunks - 4..chunks].try_into().unwrap()) as usize;
    for entry in index[chunks..chunks + 4 * count].chunks_mut(4) {
        let offset = u32::from_be_bytes(entry.try_into().unwrap()) + (bytes.len() - moov) as u32;
        entry.copy_from_slice(&offset.to_be_bytes());
    }
    [&bytes[..mdat], &index, &bytes[mdat..moov]].concat()
}
