//! The command line: arguments -> one function a command, each in its own file and thin.
//!
//! Everything that scripts rely on is decided here: exit codes, one `error:` line on stderr, `--json` on stdout and
//! nothing else there, and whether there is a screen to draw on.

mod arguments;
mod bench;
mod check;
mod chosen;
mod data;
mod data_episodes;
pub mod data_pack;
mod data_tokens;
mod data_validate;
mod device;
mod forecast;
mod lines;
mod metrics;
mod open;
mod output;
mod plan;
mod profile;
mod recorded;
mod run;
mod session;
mod stop;
mod submit;
mod verdict;
mod verify;
mod weights;

pub use arguments::{Arguments, Command};
pub use device::{Device, describe};

use crate::{Error, Exit, Result};
use arguments::Global;
use clap::Parser;
use clap::error::ErrorKind;
use std::io::IsTerminal;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// Code commit this binary was built from: 12 hex digits, `-dirty` if the tree differed, or `unknown`.
pub const COMMIT: &str = env!("LBVA_COMMIT");

/// Version and commit of the program, as runs record it.
pub(crate) fn code_version() -> String {
    format!("{} {COMMIT}", env!("CARGO_PKG_VERSION"))
}

/// The whole program: parses, runs one command, maps its end to an exit code.
pub fn main() -> ExitCode {
    let code = match catch_unwind(AssertUnwindSafe(start)) {
        Ok(exit) => exit.code(),
        // The panic hook has said where.
        Err(_) => {
            output::say("error: the program failed at the place named above; this is a bug");
            Exit::Crash.code()
        }
    };
    ExitCode::from(code)
}

fn start() -> Exit {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return usage(&error),
    };
    let json = arguments.global.json;
    let may_draw = matches!(arguments.command, None | Some(Command::Demo(_) | Command::Run(_) | Command::Resume(_)));
    if !may_draw || screen(&arguments.global).is_err() {
        tell_warnings();
    }
    match dispatch(arguments) {
        Ok(exit) => exit,
        Err(error) => {
            output::fail(&error, json);
            error.exit
        }
    }
}

/// clap's own words, and its document for a script that asked for one.
fn usage(error: &clap::Error) -> Exit {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Help that was asked for goes to stdout; a reader that left early is no error.
        let _ = error.print();
        return Exit::Done;
    }
    let _ = error.print();
    if std::env::args_os().any(|argument| argument == "--json") {
        let text = error.render().to_string();
        let what = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        output::document_of(&Error::usage("usage", what));
    }
    Exit::Usage
}

fn dispatch(arguments: Arguments) -> Result<Exit> {
    let Arguments { global, path, command } = arguments;
    match (command, path) {
        (Some(_), Some(path)) => Err(Error::usage("usage", format!("{} stands before the command", path.display()))
            .hint("name the experiment after the command, as in: lbva-tui run experiments/demo")),
        (None, path) => open::open(path.as_deref(), &global),
        (Some(Command::Demo(arguments)), None) => run::demo(&arguments, &global),
        (Some(Command::Run(arguments)), None) => run::run(&arguments, &global),
        (Some(Command::Resume(arguments)), None) => run::resume(&arguments, &global),
        (Some(Command::Submit(arguments)), None) => submit::submit(&arguments, &global),
        (Some(Command::Plan(arguments)), None) => plan::plan(&arguments, &global),
        (Some(Command::Stop(arguments)), None) => stop::stop(&arguments, &global),
        (Some(Command::Check(arguments)), None) => check::check(&arguments, &global),
        (Some(Command::Verify(arguments)), None) => verify::verify(&arguments, &global),
        (Some(Command::Bench(arguments)), None) => bench::bench(&arguments, &global),
        (Some(Command::CompileKernels { name, gpu }), None) => bench::compile_kernels(&name, gpu),
        (Some(Command::Profile(arguments)), None) => profile::profile(&arguments, &global),
        (Some(Command::Metrics(arguments)), None) => metrics::metrics(&arguments, &global),
        (Some(Command::Data(arguments)), None) => data::data(&arguments, &global),
        (Some(Command::Weights(arguments)), None) => weights::weights(&arguments, &global),
        (Some(Command::Report(arguments)), None) => verdict::report(&arguments, &global),
    }
}

/// Has what the library warns of said on stderr: not beside a console, which draws there.
fn tell_warnings() {
    // A second subscriber would be refused; there is none.
    let _ = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .log_internal_errors(false)
        .try_init();
}

/// Is there a screen to draw on? Or why not; nothing where `--no-ui` or `--json` asked for lines.
fn screen(global: &Global) -> std::result::Result<(), Option<&'static str>> {
    if global.no_ui || global.json {
        return Err(None);
    }
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let kind = std::env::var("TERM").unwrap_or_default();
    match (terminal, kind.as_str()) {
        (false, _) => Err(Some("no terminal")),
        (true, "dumb") => Err(Some("TERM=dumb")),
        (true, "") => Err(Some("TERM is not set")),
        (true, _) => Ok(()),
    }
}

/// Is there a screen to draw on? Says once on stderr why not, unless `--no-ui` or `--json` asked for lines.
pub(crate) fn has_screen(global: &Global) -> bool {
    let screen = screen(global);
    if let Err(Some(reason)) = screen {
        output::say(&format!("{reason}: going on as with --no-ui"));
    }
    screen.is_ok()
}

/// Refuses what `--read-only` forbids.
pub(crate) fn allow_writing(global: &Global, action: &str) -> Result<()> {
    match global.read_only {
        true => Err(Error::usage("read_only", format!("{action} is not possible with --read-only"))),
        false => Ok(()),
    }
}
