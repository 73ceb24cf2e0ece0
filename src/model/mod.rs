//! The models: Wan2.2-style diffusion transformer blocks, token layouts, the geometry branch, checkpoint names.
//!
//! Written once over [`crate::ops`]; nothing here knows about devices, optimizers or files.

mod block;
mod count;
mod geometry;
mod lingbot_parameters;
mod parameters;
mod timestep;
mod xwam;

pub use block::{Block, Conditioning};
pub use count::{ParameterCount, Part, count};
pub use lingbot_parameters::lingbot_parameter_specs;
pub use parameters::{Initialiser, ParameterSpec, Parameters, parameter_specs};
pub use xwam::{XwamInput, XwamModel, XwamOutput};
