//! `verify`: proofs of the engine against reference numbers.

use super::arguments::{Global, Verify, VerifyArguments};
use super::output;
use crate::train::golden;
use crate::{Error, Exit, Result};
use serde_json::json;

/// Recomputes golden files; exit 0 only if every one is inside its tolerances. A file that is not a golden file does
/// not keep the others from being verified.
pub fn verify(arguments: &VerifyArguments, global: &Global) -> Result<Exit> {
    let Verify::Golden { files } = &arguments.what;
    let mut documents = Vec::new();
    let mut first_failure: Option<Error> = None;
    for file in files {
        let failure = match golden::verify(file) {
            Ok(report) => {
                if !global.json {
                    output::line(report.to_text())?;
                }
                documents.push(json!({"passed": report.passed(), "report": report}));
                let failed = report.comparisons.iter().filter(|comparison| !comparison.passed).count();
                (failed > 0).then(|| {
                    let what = format!("{failed} of {} comparisons are outside tolerance", report.comparisons.len());
                    Error::crash(what).at(file)
                })
            }
            Err(error) => {
                documents.push(json!({"passed": false, "file": file, "error": output::as_json(&error)}));
                Some(error)
            }
        };
        if let Some(error) = failure {
            output::warn(&error);
            first_failure.get_or_insert(error);
        }
    }
    if global.json {
        output::document(&json!({"passed": first_failure.is_none(), "files": documents}))?;
    }
    Ok(first_failure.map_or(Exit::Done, |error| error.exit))
}
