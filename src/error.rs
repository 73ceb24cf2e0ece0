//! The one error type: what went wrong, where, and what to do about it.
//!
//! Every failure a user can meet ends as one line on stderr and one exit code, so errors are built for reading, not
//! for matching: a stable `code` for machines (`file_missing`, `too_short`, ...), a sentence for people, the place
//! (file, field, clip), and a hint. The exit codes stay below 128 because Slurm's text output drops bit 7.

use std::fmt;
use std::path::Path;

/// Process exit codes, by who has to act next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// All steps done.
    Done = 0,
    /// The command line is wrong.
    Usage = 2,
    /// A dataset, clip or input file is absent or broken.
    BadData = 65,
    /// A device or the network cannot be used.
    Unavailable = 69,
    /// The program failed; a bug, or a state nobody foresaw.
    Crash = 70,
    /// A file could not be written: disk full, quota, permissions.
    Disk = 74,
    /// Stopped early with a durable checkpoint: resume me.
    Stopped = 75,
    /// Identity or configuration refused: retrying will not help.
    Refused = 78,
}

impl Exit {
    /// The number the process ends with.
    pub fn code(self) -> u8 {
        self as u8
    }
}

/// `Result` with the project's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One failure. `Display` is the single line a user reads: `what (where); hint`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Who has to act.
    pub exit: Exit,
    /// Stable machine-readable reason, snake_case: `file_missing`, `unknown_key`, `decode_failed`.
    pub code: &'static str,
    /// What is wrong, without the place.
    pub what: String,
    /// File, field or clip; empty if there is none.
    pub place: String,
    /// What to do; empty if the sentence already says it.
    pub hint: String,
}

impl Error {
    /// A failure with this exit code, machine reason and sentence.
    pub fn new(exit: Exit, code: &'static str, what: impl fmt::Display) -> Self {
        Self { exit, code, what: one_line(&what.to_string()), place: String::new(), hint: String::new() }
    }

    /// Input data is absent or broken (exit 65).
    pub fn data(code: &'static str, what: impl fmt::Display) -> Self {
        Self::new(Exit::BadData, code, what)
    }

    /// Configuration or identity refused (exit 78).
    pub fn refused(code: &'static str, what: impl fmt::Display) -> Self {
        Self::new(Exit::Refused, code, what)
    }

    /// The command line is wrong (exit 2).
    pub fn usage(code: &'static str, what: impl fmt::Display) -> Self {
        Self::new(Exit::Usage, code, what)
    }

    /// A write failed (exit 74).
    pub fn disk(code: &'static str, what: impl fmt::Display) -> Self {
        Self::new(Exit::Disk, code, what)
    }

    /// Something nobody foresaw (exit 70).
    pub fn crash(what: impl fmt::Display) -> Self {
        Self::new(Exit::Crash, "crash", what)
    }

    /// Names the file.
    pub fn at(mut self, path: impl AsRef<Path>) -> Self {
        self.place = one_line(&path.as_ref().display().to_string());
        self
    }

    /// Names a field, clip or other place that is no path.
    pub fn in_place(mut self, place: impl fmt::Display) -> Self {
        self.place = one_line(&place.to_string());
        self
    }

    /// Says what to do.
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = one_line(&hint.to_string());
        self
    }
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if !self.place.is_empty() {
            write!(f, " ({})", self.place)?;
        }
        if !self.hint.is_empty() {
            write!(f, "; {}", self.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// Tensor arithmetic fails only on a shape or dtype that the program itself built wrong, or because a GPU failed under it.
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        #[cfg(feature = "cuda")]
        if let Some(error) = of_a_gpu(&error) {
            return error;
        }
        Self::crash(format!("tensor operation failed: {}", tensor_words(&error)))
    }
}

/// The error of a GPU that candle passes on.
#[cfg(feature = "cuda")]
fn of_a_gpu(error: &candle_core::Error) -> Option<Error> {
    use candle_core::Error as Candle;
    use candle_core::cuda_backend::CudaError;
    match error {
        Candle::WithBacktrace { inner, .. } | Candle::WithPath { inner, .. } | Candle::Context { inner, .. } => {
            of_a_gpu(inner)
        }
        Candle::Cuda(error) => match (error.downcast_ref::<Error>(), error.downcast_ref::<CudaError>()) {
            (Some(own), _) => Some(own.clone()),
            (_, Some(CudaError::Cuda(driver) | CudaError::Load { cuda: driver, .. })) => {
                Some(crate::cuda::device_error(*driver, "embedders, heads or sampling"))
            }
            _ => error.downcast_ref().map(|driver| crate::cuda::device_error(*driver, "embedders, heads or sampling")),
        },
        _ => None,
    }
}

/// What candle says, without the backtrace that it adds where RUST_BACKTRACE is set.
pub fn tensor_words(error: &candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => tensor_words(inner),
        other => other.to_string(),
    }
}
