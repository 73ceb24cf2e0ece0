//! `verify`: proofs of the engine against reference numbers.

use super::arguments::{Global, Verify, VerifyArguments};
use super::output;
use crate::train::golden;
use crate::{Error, Exit, Result};

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
    let failed: Vec<String> =
        reports.iter().filter(|report| !report.passed()).map(|report| report.file.display().to_string()).collect();
    if failed.is_empty() {
        return Ok(Exit::Done);
    }
    let error = Error::new(Exit::Crash, "golden_differs", "the engine's numbers differ from the golden file's")
        .in_place(failed.join(", "));
    // With --json the reports are the document.
    if global.json {
        output::warn(&error);
        return Ok(error.exit);
    }
    Err(error)
}
