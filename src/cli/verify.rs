//! `verify`: proofs of the engine against reference numbers.

use super::arguments::{Global, Verify, VerifyArguments};
use crate::{Error, Exit, Result};

/// Recomputes golden files; exit 0 only if every one is inside its tolerances.
pub fn verify(arguments: &VerifyArguments, _global: &Global) -> Result<Exit> {
    let Verify::Golden { files } = &arguments.what;
    let named = files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
    Err(Error::new(Exit::Unavailable, "not_built", "this build has no engine to verify").in_place(named))
}
