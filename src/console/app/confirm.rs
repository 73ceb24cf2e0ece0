//! Deeds on runs: each is asked first, and bound to one attempt of one arm. If another attempt stands there when Enter
//! comes, nothing is done.

use super::super::format::{bytes, duration, milliseconds, thousands};
use super::super::status;
use super::{App, Effect, Modal, edit};
use crate::runlog::{Liveness, RunState, RunView};
use crate::slurm::{Act, JobId, JobView, Scheduler, Slurm, judge};
use crossterm::event::{KeyCode, KeyEvent};
use std::path::{Path, PathBuf};
use tui_input::Input;

/// What may be done to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    Stop,
    Kill,
    Resume,
}

impl Deed {
    /// The verb.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Kill => "kill",
            Self::Resume => "resume",
        }
    }
}

/// One attempt of one arm: what a deed is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub arm: String,
    pub directory: PathBuf,
    /// 0 if none has started.
    pub attempt: u32,
    pub pid: u32,
    pub host: String,
    /// The job of that attempt; of a run that waits for a machine, the job that waits.
    pub job: Option<JobId>,
    /// No attempt of this job is at work: it waits.
    pub waits: bool,
}

impl Target {
    /// The newest attempt of `run`, or the job that it waits with.
    pub fn of(run: &RunView, state: RunState, job: Option<&JobView>) -> Self {
        let started = run.attempts.last().map(|attempt| &attempt.started);
        let waits = state == RunState::Queued;
        let waiting = job.filter(|_| waits).map(|job| job.id);
        Self {
            job: waiting.or_else(|| Some(started?.job.as_ref()?.id)),
            waits,
            arm: run.arm.clone(),
            directory: run.directory.clone(),
            attempt: started.map_or(0, |started| started.attempt),
            pid: started.map_or(0, |started| started.pid),
            host: started.map(|started| started.host.clone()).unwrap_or_default(),
        }
    }
}

/// An open question.
#[derive(Clone, Debug)]
pub struct Confirm {
    pub deed: Deed,
    pub target: Target,
    /// The arm's name as typed so far; only a kill asks for it.
    pub typed: Input,
}

impl Confirm {
    /// May Enter act?
    pub fn is_ready(&self) -> bool {
        self.deed != Deed::Kill || self.typed.value().trim() == self.target.arm
    }
}

impl App {
    /// Opens the question, or says why the deed makes no sense now.
    pub(super) fn ask(&mut self, deed: Deed) {
        if self.read_only {
            self.say(false, format!("read-only: {} is off", deed.word()));
            return;
        }
        let Some(run) = self.selected_run() else {
            self.say(false, format!("no arm to {}", deed.word()));
            return;
        };
        let job = self.job(&run.arm);
        let (state, _) = judge(run, self.now_ms, job);
        match refusal(deed, run, state) {
            Some(text) => self.say(false, text),
            None => {
                let target = Target::of(run, state, job);
                self.modal = Modal::Confirm(Confirm { deed, target, typed: Input::default() });
            }
        }
    }

    pub(super) fn confirm_key(&mut self, key: KeyEvent, mut confirm: Confirm) -> Vec<Effect> {
        match key.code {
            KeyCode::Esc => {
                self.say(true, format!("{} left as it is", confirm.target.arm));
                Vec::new()
            }
            KeyCode::Enter if confirm.is_ready() => self.confirmed(confirm),
            _ => {
                if confirm.deed == Deed::Kill {
                    edit(&mut confirm.typed, key);
                }
                self.modal = Modal::Confirm(confirm);
                Vec::new()
            }
        }
    }

    fn confirmed(&mut self, confirm: Confirm) -> Vec<Effect> {
        let Confirm { deed, target, .. } = confirm;
        let current = self.runs().iter().find(|run| run.arm == target.arm).map(|run| {
            let job = self.job(&run.arm);
            let (state, _) = judge(run, self.now_ms, job);
            (Target::of(run, state, job), state)
        });
        let refused = match &current {
            None => Some(format!("{} is gone; nothing was done", target.arm)),
            Some((now, _)) if *now != target => Some(format!(
                "{} is at attempt {} (pid {}) by now; nothing was done, ask again",
                target.arm, now.attempt, now.pid
            )),
            Some((_, state)) => self
                .runs()
                .iter()
                .find(|run| run.arm == target.arm)
                .and_then(|run| refusal(deed, run, *state))
                .map(|why| format!("nothing was done: {why}")),
        };
        if let Some(text) = refused {
            self.say(false, text);
            return Vec::new();
        }
        self.say(true, format!("{} {}: asked, waiting for the answer", deed.word(), target.arm));
        let submits = self.resumes_in_slurm(&target.arm);
        match deed {
            Deed::Stop | Deed::Kill if target.waits => {
                let Target { arm, job, .. } = target;
                job.map(|job| Effect::Cancel { arm, job }).into_iter().collect()
            }
            Deed::Resume if submits => vec![Effect::Submit { arm: target.arm }],
            Deed::Stop => vec![Effect::Stop(target)],
            Deed::Kill => vec![Effect::Kill(target)],
            Deed::Resume => vec![Effect::Resume { arm: target.arm }],
        }
    }

    /// A run that was last handed to Slurm goes on there.
    fn resumes_in_slurm(&self, arm: &str) -> bool {
        self.snapshot.as_ref().is_some_and(|snapshot| snapshot.submits) && self.job(arm).is_some()
    }

    /// Heading and body of the question, from the newest data.
    pub fn question(&self, confirm: &Confirm) -> (String, Vec<String>) {
        let target = &confirm.target;
        let run = self.runs().iter().find(|run| run.arm == target.arm);
        let since = |ms| run.map_or(0, |run| run.since_ms(ms, self.now_ms));
        let started_ms = run.and_then(|run| run.attempts.last()).map(|attempt| attempt.started_ms);
        let age = started_ms.map(|ms| format!(", {}", duration(since(ms)))).unwrap_or_default();
        let save = match run.and_then(|run| run.last_save) {
            Some(save) => format!(
                "Last save: step {}, {} ago ({}).",
                thousands(save.step),
                duration(since(save.time_ms)),
                bytes(save.bytes as f64)
            ),
            None => "Nothing is saved yet.".to_owned(),
        };
        let took = run.and_then(|run| run.last_save).map(|save| format!(" (about {})", milliseconds(save.ms)));
        let step = run.and_then(|run| status::progress(run)).map_or(0, |(step, _)| step);
        let saved = run.and_then(|run| run.last_save).map_or(0, |save| save.step);
        // `<experiment>/runs/<arm>`
        let experiment = target.directory.parent().and_then(Path::parent).unwrap_or(Path::new(".")).display();
        let slurm = |act| target.job.map(|job| Slurm::default().command(act, job)).unwrap_or_default();
        match (confirm.deed, target.job) {
            (Deed::Stop | Deed::Kill, Some(job)) if target.waits => (
                format!("Cancel job {job} of {}", target.arm),
                vec![
                    format!("Takes the job out of the queue: {}", slurm(Act::Cancel)),
                    save,
                    "R submits the run again.".to_owned(),
                ]
                .into_iter()
                .chain((confirm.deed == Deed::Kill).then(|| format!("Type {} to cancel it:", target.arm)))
                .collect(),
            ),
            (Deed::Stop, Some(job)) => (
                format!("Stop {} (job {job} on {}{age}, attempt {})", target.arm, target.host, target.attempt),
                vec![
                    format!("Writes a checkpoint at the next step{}, then cancels the job:", took.unwrap_or_default()),
                    format!("{}, and when it is written {}", slurm(Act::Signal), slurm(Act::Cancel)),
                    save,
                    "R resumes it later; nothing is lost.".to_owned(),
                    format!("As a command: lbva-tui stop {experiment} --arm {}", target.arm),
                ],
            ),
            (Deed::Kill, Some(job)) => (
                format!("Kill {} (job {job} on {}{age}, attempt {})", target.arm, target.host, target.attempt),
                vec![
                    format!("Ends the job at once and saves nothing: {}", slurm(Act::Cancel)),
                    save,
                    format!("{} steps since then are lost. S would save first.", thousands(step.saturating_sub(saved))),
                    format!("As a command: lbva-tui stop {experiment} --arm {} --kill", target.arm),
                    format!("Type {} to kill it:", target.arm),
                ],
            ),
            (Deed::Resume, _) if self.resumes_in_slurm(&target.arm) => (
                format!("Submit {}", target.arm),
                vec![
                    format!("A new job goes on from step {}.", thousands(saved)),
                    save,
                    format!("See the script: lbva-tui submit {experiment} --arm {} --dry-run", target.arm),
                    format!("As a command: lbva-tui submit {experiment} --arm {}", target.arm),
                ],
            ),
            (Deed::Stop, None) => (
                format!("Stop {} (pid {}{age}, attempt {})", target.arm, target.pid, target.attempt),
                vec![
                    format!("Writes a checkpoint at the next step{}, then ends.", took.unwrap_or_default()),
                    save,
                    "R resumes it later; nothing is lost.".to_owned(),
                    format!("As a command: lbva-tui stop {experiment} --arm {}", target.arm),
                ],
            ),
            (Deed::Kill, None) => (
                format!("Kill {} (pid {}{age}, attempt {})", target.arm, target.pid, target.attempt),
                vec![
                    format!("Ends pid {} on {} at once and saves nothing.", target.pid, target.host),
                    save,
                    format!("{} steps since then are lost. S would save first.", thousands(step.saturating_sub(saved))),
                    format!("As a command: lbva-tui stop {experiment} --arm {} --kill", target.arm),
                    format!("Type {} to kill it:", target.arm),
                ],
            ),
            (Deed::Resume, _) => {
                let verb = if target.attempt == 0 { "Start" } else { "Resume" };
                let from = if saved == 0 { "step 0".to_owned() } else { format!("step {}", thousands(saved)) };
                (
                    format!("{verb} {}", target.arm),
                    vec![
                        format!("Starts attempt {} on this machine from {from}.", target.attempt + 1),
                        save,
                        format!("As a command: lbva-tui resume {experiment} --arm {}", target.arm),
                    ],
                )
            }
        }
    }
}

/// Why a deed makes no sense in this state; `None` if it does.
fn refusal(deed: Deed, run: &RunView, state: RunState) -> Option<String> {
    let arm = &run.arm;
    let word = status::state_look(state).1;
    match deed {
        Deed::Stop if state == RunState::Stopping => Some(format!("{arm} is stopping already")),
        Deed::Stop | Deed::Kill if state == RunState::Queued => None,
        Deed::Resume if state == RunState::Queued => Some(format!("{arm} waits in the queue already")),
        Deed::Stop | Deed::Kill if !status::is_active(state) => {
            Some(format!("{arm} is {word}; there is no process to {}", deed.word()))
        }
        Deed::Kill if run.liveness == Liveness::Unknown && run.attempt().is_some_and(|it| it.started.job.is_none()) => {
            let host = run.attempts.last().map_or("another host", |attempt| attempt.started.host.as_str());
            Some(format!("{arm} runs on {host}: kill it there; S works from here"))
        }
        Deed::Resume if status::is_active(state) => Some(format!("{arm} is {word}; there is nothing to resume")),
        Deed::Resume if state == RunState::Finished => Some(format!("{arm} has finished all steps")),
        _ => None,
    }
}
