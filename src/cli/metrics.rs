//! `metrics`: PSNR, SSIM and LPIPS of two pictures or two folders.

use super::arguments::{Global, MetricsArguments};
use super::output;
use crate::eval::compare::compare;
use crate::{Exit, Result};

/// Prints the scores of each pair and their means.
pub fn metrics(arguments: &MetricsArguments, global: &Global) -> Result<Exit> {
    let comparison = compare(&arguments.a, &arguments.b)?;
    if global.json {
        output::document(&comparison)?;
    } else {
        output::line(comparison.render_text().trim_end())?;
    }
    Ok(Exit::Done)
}
