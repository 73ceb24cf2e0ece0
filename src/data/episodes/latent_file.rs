//! LingBot-VA's published latent files: one view of one sample, encoded beforehand by the Wan2.2 VAE and normalised,
//! with the embedding of its text.

use candle_core::pickle::Object;
use std::path::{Path, PathBuf};

use super::tile::Cells;
use super::torch_file::{TensorPlace, TorchFile, natural};
use crate::codec::CHANNELS;
use crate::pack::length::latent_frames;
use crate::{Error, Result};

/// An open latent file; numbers are read on demand.
pub(super) struct LatentFile {
    path: PathBuf,
    file: TorchFile,
    latent: TensorPlace,
    /// Latent frames F.
    pub frames: usize,
    /// (height, width) in latent cells.
    pub cells: Cells,
    /// Source frames that were encoded, counted from the start of the episode.
    pub frame_ids: Vec<usize>,
}

impl LatentFile {
    /// Opens a file and checks it against itself.
    ///
    /// # Errors
    /// Those of [`TorchFile::open`]; `latent_corrupt` for a field that is absent or of another kind; `latent_shape`
    /// if the rows are not frames x height x width of 48 channels; `latent_frames` if the frames told are not those
    /// of `frame_ids`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = TorchFile::open(path)?;
        let field = |name: &str| file.field(name).ok_or_else(|| file.corrupt(format!("it has no {name}")));
        let number = |name: &str| {
            natural(field(name)?).ok_or_else(|| file.corrupt(format!("{name} is no number that counts something")))
        };
        let frames = number("latent_num_frames")?;
        let cells = (number("latent_height")?, number("latent_width")?);
        let (Object::List(ids) | Object::Tuple(ids)) = field("frame_ids")? else {
            return Err(file.corrupt("frame_ids is no list".into()));
        };
        let frame_ids: Option<Vec<usize>> = ids.iter().map(natural).collect();
        let frame_ids = frame_ids.ok_or_else(|| file.corrupt("frame_ids holds what is no frame".into()))?;
        let latent = file.place(field("latent")?, "latent")?;

        let rows = frames.checked_mul(cells.0).and_then(|rows| rows.checked_mul(cells.1));
        if latent.shape.len() != 2 || Some(latent.shape[0]) != rows || latent.shape[1] != CHANNELS {
            let what = format!(
                "latent is {:?}, but {frames} frames of {}x{} cells and {CHANNELS} channels are told",
                latent.shape, cells.0, cells.1
            );
            return Err(Error::data("latent_shape", what).at(path));
        }
        if frame_ids.is_empty() || latent_frames(frame_ids.len(), 1)? != frames {
            let what = format!("latent_num_frames is {frames}, but frame_ids has {} frames", frame_ids.len());
            return Err(Error::data("latent_frames", what)
                .at(path)
                .hint("n video frames are (n - 1) / 4 + 1 latent ones"));
        }
        Ok(Self { path: path.to_owned(), latent, frames, cells, frame_ids, file })
    }

    /// The first source frame that was encoded.
    pub fn first_frame(&self) -> usize {
        self.frame_ids.first().copied().unwrap_or(0)
    }

    /// Compares the file with what its recipe and its dataset say: `cells` of its view, `frames` of its sample.
    ///
    /// # Errors
    /// `latent_size`, `latent_frames`, `latent_stride`.
    pub fn check(&self, cells: Cells, frames: usize, stride: usize) -> Result<()> {
        if self.cells != cells {
            let what = format!(
                "latent_height and latent_width are {}x{}, the tile needs {}x{}",
                self.cells.0, self.cells.1, cells.0, cells.1
            );
            return Err(Error::data("latent_size", what).at(&self.path).hint("all files of a view must have one size"));
        }
        if self.frames != frames {
            let what = format!("latent_num_frames is {}, the metadata and the other views say {frames}", self.frames);
            return Err(Error::data("latent_frames", what).at(&self.path));
        }
        if let Some(pair) = self.frame_ids.windows(2).find(|pair| pair[0].checked_add(stride) != Some(pair[1])) {
            let what = format!("frame_ids goes from {} to {}, data.frame_stride is {stride}", pair[0], pair[1]);
            return Err(Error::data("latent_stride", what).at(&self.path).hint("set data.frame_stride to the files'"));
        }
        Ok(())
    }

    /// Latents [48, F, height, width]; the file has channels innermost.
    ///
    /// # Errors
    /// `latent_corrupt`; `latent_nonfinite`.
    pub fn latents(&mut self) -> Result<Vec<f32>> {
        let rows = self.file.numbers(&self.latent, "latent")?;
        if let Some(at) = rows.iter().position(|value| !value.is_finite()) {
            let what = format!("latent is {} in row {}, channel {}", rows[at], at / CHANNELS, at % CHANNELS);
            return Err(Error::data("latent_nonfinite", what).at(&self.path).hint("encode the episode again"));
        }
        Ok((0..CHANNELS).flat_map(|channel| rows.iter().skip(channel).step_by(CHANNELS)).copied().collect())
    }

    /// The embedding of the sample's text, without the rows of zeros after it.
    ///
    /// # Errors
    /// `latent_corrupt`, `text_mismatch`, `text_nonfinite`.
    pub fn text(&mut self, text_len: usize, text_dim: usize) -> Result<Vec<f32>> {
        let Some(tensor) = self.file.field("text_emb") else {
            return Err(self.file.corrupt("it has no text_emb".into()));
        };
        let place = self.file.place(tensor, "text_emb")?;
        text(&mut self.file, &self.path, "text_emb", &place, [text_len, text_dim])
    }
}

/// The embedding of the empty prompt (`empty_emb.pt`), without the rows of zeros after it.
///
/// # Errors
/// Those of [`TorchFile::open`] and [`LatentFile::text`].
pub(super) fn empty_text(path: &Path, text_len: usize, text_dim: usize) -> Result<Vec<f32>> {
    let mut file = TorchFile::open(path)?;
    let place = file.place(file.root(), "the tensor")?;
    text(&mut file, path, "the tensor", &place, [text_len, text_dim])
}

fn text(file: &mut TorchFile, path: &Path, field: &str, place: &TensorPlace, shape: [usize; 2]) -> Result<Vec<f32>> {
    if place.shape != shape {
        let what = format!("{field} is {:?}, the model takes {shape:?}", place.shape);
        return Err(Error::refused("text_mismatch", what).at(path).hint("correct model.text_len and model.text_dim"));
    }
    let rows = file.numbers(place, field)?;
    if rows.iter().any(|value| !value.is_finite()) {
        return Err(Error::data("text_nonfinite", format!("{field} holds a value that is not finite")).at(path));
    }
    Ok(crate::data::text::real_rows(rows, shape[1]))
}
