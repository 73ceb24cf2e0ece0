//! `verify`: proofs of the engine against reference numbers.

use super::arguments::{Global, Verify, VerifyArguments};
use super::output;
use crate::train::golden;
use crate::{Exit, Result};

/// Recomputes golden files; exit 0 only if every one is inside its tolerances, 70 if one is not.
pub fn verify(arguments: &VerifyArguments, global: &Global) -> Result<Exit> {
    let Verify::Golden { files } = &arguments.what;
    let mut reports = Vec::new();
    for file in files {
        let report = golden::verify(file)?;
        if !global.json {
            output::line(report.to_text())?;
        }
        reports.push(report);
    }
    if global.json {
        output::document(&reports)?;
    }
    let passed = reports.iter().all(golden::Report::passed);
    Ok(if passed { Exit::Done } else { Exit::Crash })
}
