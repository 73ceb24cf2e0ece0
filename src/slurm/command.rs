//! One command of the scheduler: what is run, how long it may take, and what it answered.
//!
//! `squeue` blocks for a quarter of a minute when the controller is down, so no call is without a limit. The user's own
//! format variables are kept out: they would change the output that is parsed.

use crate::{Error, Exit, Result};
use std::collections::VecDeque;
use std::fmt;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Between two looks at a running command.
const POLL: Duration = Duration::from_millis(5);
/// Prefixes of variables that change what Slurm's commands do or print. `SBATCH_*` would win over the script that was shown.
const FOREIGN: [&str; 5] = ["SQUEUE_", "SACCT_", "SBATCH_", "SCANCEL_", "SCONTROL_"];

/// A command line with its time limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub program: &'static str,
    pub arguments: Vec<String>,
    pub limit: Duration,
}

impl Call {
    pub fn new(program: &'static str, arguments: &[&str], limit_s: u64) -> Self {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Self { program, arguments, limit: Duration::from_secs(limit_s) }
    }
}

/// As one would type it.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.program)?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {}", quoted(argument)))
    }
}

/// A word for a shell.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// What a command answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub stdout: String,
    pub stderr: String,
    /// Exit code, or 128 and the number of the signal that killed it.
    pub code: i32,
}

/// Runs the scheduler's commands.
pub trait Commands: fmt::Debug + Send + Sync {
    /// Runs one to its end, whatever its exit code.
    ///
    /// # Errors
    /// `slurm_absent` if there is no such program, `slurm_silent` if it took longer than its limit (exit 69).
    fn run(&self, call: &Call) -> Result<Answer>;
}

/// The programs of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemCommands;

impl Commands for SystemCommands {
    fn run(&self, call: &Call) -> Result<Answer> {
        let mut command = Command::new(call.program);
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| FOREIGN.iter().any(|prefix| name.starts_with(prefix))) {
                command.env_remove(name);
            }
        }
        command.args(&call.arguments).env("LC_ALL", "C").env("SLURM_TIME_FORMAT", "%s");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|error| {
            Error::new(Exit::Unavailable, "slurm_absent", format!("{} cannot be run: {error}", call.program))
                .hint("is this a machine with Slurm's commands, and are they on the PATH?")
        })?;
        wait(child, call)
    }
}

fn wait(mut child: Child, call: &Call) -> Result<Answer> {
    let stdout = child.stdout.take().map(collect);
    let stderr = child.stderr.take().map(collect);
    let began = Instant::now();
    let broken = |error: std::io::Error| Error::crash(format!("{} cannot be waited for: {error}", call.program));
    let status = loop {
        if let Some(status) = child.try_wait().map_err(broken)? {
            break status;
        }
        if began.elapsed() > call.limit {
            let _ = child.kill();
            let _ = child.wait();
            let what = format!("{} has not answered for {} s", call.program, call.limit.as_secs());
            return Err(Error::new(Exit::Unavailable, "slurm_silent", what).hint("the controller may be down"));
        }
        std::thread::sleep(POLL);
    };
    let text = |thread: Option<std::thread::JoinHandle<String>>| thread.and_then(|it| it.join().ok());
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(-1);
    Ok(Answer { stdout: text(stdout).unwrap_or_default(), stderr: text(stderr).unwrap_or_default(), code })
}

fn collect(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Answers from a list, for tests: each call takes the first answer whose beginning fits, and is remembered.
#[derive(Debug, Default)]
pub struct RecordedCommands {
    answers: Mutex<VecDeque<(String, Result<Answer>)>>,
    calls: Mutex<Vec<String>>,
}

impl RecordedCommands {
    /// The next call whose command line begins with `start` gets this answer.
    pub fn answer(&self, start: &str, answer: Result<Answer>) {
        lock(&self.answers).push_back((start.to_owned(), answer));
    }

    /// Prints `stdout` and exits with 0.
    pub fn print(&self, start: &str, stdout: &str) {
        self.answer(start, Ok(Answer { stdout: stdout.to_owned(), ..Answer::default() }));
    }

    /// Complains on stderr and exits with 1.
    pub fn refuse(&self, start: &str, stderr: &str) {
        self.answer(start, Ok(Answer { stderr: stderr.to_owned(), code: 1, ..Answer::default() }));
    }

    /// Command lines so far.
    pub fn calls(&self) -> Vec<String> {
        lock(&self.calls).clone()
    }
}

impl Commands for RecordedCommands {
    fn run(&self, call: &Call) -> Result<Answer> {
        let line = call.to_string();
        lock(&self.calls).push(line.clone());
        let mut answers = lock(&self.answers);
        let found = answers.iter().position(|(start, _)| line.starts_with(start.as_str()));
        match found.and_then(|index| answers.remove(index)) {
            Some((_, answer)) => answer,
            None => Err(Error::new(Exit::Unavailable, "slurm_absent", format!("no recorded answer to: {line}"))),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_answers_or_is_ended_at_its_limit() {
        let answer = SystemCommands.run(&Call::new("sh", &["-c", "echo $LC_ALL; echo no >&2; exit 3"], 20)).unwrap();
        assert_eq!(answer, Answer { stdout: "C\n".to_owned(), stderr: "no\n".to_owned(), code: 3 });
        assert_eq!(SystemCommands.run(&Call::new("sh", &["-c", "kill -9 $$"], 20)).unwrap().code, 137);
        let error = SystemCommands.run(&Call::new("sleep", &["60"], 0)).expect_err("too slow");
        assert_eq!((error.exit, error.code), (Exit::Unavailable, "slurm_silent"));
        let error = SystemCommands.run(&Call::new("no-such-scheduler", &[], 1)).expect_err("absent");
        assert_eq!((error.exit, error.code), (Exit::Unavailable, "slurm_absent"));
        assert!(error.what.starts_with("no-such-scheduler cannot be run"), "{error}");
    }

    #[test]
    fn a_command_line_is_shown_as_it_can_be_typed() {
        let call = Call::new("scancel", &["--signal=USR2", "12", "a b", "it's", ""], 1);
        assert_eq!(call.to_string(), r"scancel --signal=USR2 12 'a b' 'it'\''s' ''");
    }
}
