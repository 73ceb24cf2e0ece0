//! Metrics of predicted video and pose, and the verdict over an experiment.
//!
//! Every metric computes in f32 or f64 and refuses any other dtype: a metric that silently rounds its inputs to bf16
//! reads a difference between two arms that is not there. `docs/metrics.md` has each definition, its traps, and which
//! of them decides.

pub mod chunk;
pub mod compare;
mod files;
pub mod levels;
pub mod lpips;
mod pictures;
pub mod pose;
mod psnr;
pub mod sample;
mod ssim;
pub mod strip;
pub mod verdict;

pub use lpips::Lpips;
pub use pose::{PoseError, pose_error};
pub use psnr::{PSNR_CAP_DB, psnr};
pub use ssim::ssim;
pub use strip::write_strip;
