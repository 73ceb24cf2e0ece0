//! What goes to stdout and stderr, and what happens if nobody reads it.

use crate::{Error, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{ErrorKind, Write};

/// Prints text and a line end on stdout. A reader that has left (`| head`) is no error.
pub fn line(text: impl AsRef<str>) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match writeln!(stdout, "{}", text.as_ref()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::disk("write_failed", format!("stdout cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints one JSON document on stdout.
pub fn document(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::crash(format!("the JSON document cannot be written: {error}")))?;
    line(text)
}

/// An error as scripts read it.
pub fn as_json(error: &Error) -> Value {
    json!({"code": error.code, "what": error.what, "place": error.place, "hint": error.hint})
}

/// Prints `{"error": ...}` on stdout.
pub fn document_of(error: &Error) {
    // If stdout is gone as well there is nobody left to tell; the exit code still says it.
    let _ = document(&json!({"error": as_json(error)}));
}

/// The one line on stderr that ends a failed command, and its document for `--json`.
pub fn fail(error: &Error, json: bool) {
    warn(error);
    if json {
        document_of(error);
    }
}

/// One `error:` line on stderr.
pub fn warn(error: &Error) {
    say(&format!("error: {error}"));
}

/// One line on stderr. Not eprintln!, which panics when stderr is closed.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A remark on stderr, where it disturbs no reader of stdout.
pub fn note(text: impl AsRef<str>) {
    let _ = writeln!(std::io::stderr(), "{}", text.as_ref());
}

/// Lines of label and text, the texts aligned.
pub fn columns(rows: &[(String, String)]) -> Vec<String> {
    let width = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
    rows.iter().map(|(label, text)| format!("{label:width$}  {text}").trim_end().to_owned()).collect()
}
