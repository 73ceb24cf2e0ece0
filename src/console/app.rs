//! The console as a pure state machine: [`App::update`] takes one message and returns what has to be done. It reads no
//! file, starts no process and asks no clock; [`super::run`] does that and feeds the results back.

mod confirm;
mod strips;

pub use confirm::{Confirm, Deed, Target};
pub use strips::StripRequest;

use super::keys::{self, Action, Context};
use super::metric::Metric;
use super::series::Curve;
use super::snapshot::{ConsoleSnapshot, LoadProgress, PictureStrip};
use super::status;
use super::theme::Theme;
use crate::runlog::{RunState, RunView};
use crate::slurm::{JobId, JobView, judge};
use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use tui_input::{Input, InputRequest};

/// How long the outcome of a deed stays on the screen.
const NOTICE_MS: u64 = 12_000;
/// Weights of the moving average that `s` walks through.
pub const SMOOTHING: [f32; 5] = [0.0, 0.3, 0.6, 0.9, 0.98];

/// Something happened.
#[derive(Clone, Debug)]
pub enum Msg {
    Key(KeyEvent),
    Resize(u16, u16),
    Tick {
        now_ms: u64,
    },
    /// The first reading goes on.
    Loading(LoadProgress),
    Snapshot(Arc<ConsoleSnapshot>),
    /// The runs could not be read; shown until a snapshot arrives.
    LoadFailed(String),
    Strip(StripRequest, Result<PictureStrip, String>),
    /// The plan of an arm, or why there is none.
    Plan {
        arm: String,
        lines: Vec<String>,
    },
    /// What really came of a deed.
    EffectResult {
        ok: bool,
        text: String,
    },
    /// A thread of the console panicked: leave in order.
    WorkerDied {
        thread: String,
        message: String,
    },
    /// Back from a suspension.
    Continued,
    /// Another process asks for one (SIGTSTP).
    Suspend,
    /// TERM, HUP, INT or QUIT.
    Signal(i32),
    /// The terminal is gone.
    TerminalLost,
}

/// Something has to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Ask this attempt to save and leave.
    Stop(Target),
    /// End this attempt's process at once.
    Kill(Target),
    /// Start the next attempt of an arm.
    Resume {
        arm: String,
    },
    /// Hand an arm to Slurm.
    Submit {
        arm: String,
    },
    /// Take an arm's waiting job out of the queue.
    Cancel {
        arm: String,
        job: JobId,
    },
    LoadStrip(StripRequest),
    /// Plan an arm: it may take seconds.
    Plan {
        arm: String,
    },
    /// Read the runs again now, and draw the whole screen.
    Refresh,
    Suspend,
    Quit(Leave),
}

/// Why the console leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leave {
    ByUser,
    Signal(i32),
    /// Thread and message.
    Crash(String, String),
    TerminalLost,
}

/// The part of the screen that has the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    #[default]
    Arms,
    Chart,
    Pictures,
    Log,
}

impl Pane {
    const ALL: [Self; 4] = [Self::Arms, Self::Chart, Self::Pictures, Self::Log];

    /// Its bindings in the key table.
    pub fn context(self) -> Context {
        match self {
            Self::Arms => Context::Everywhere,
            Self::Chart => Context::Chart,
            Self::Pictures => Context::Pictures,
            Self::Log => Context::Log,
        }
    }
}

/// What lies over the screen and takes all keys.
#[derive(Clone, Debug, Default)]
pub enum Modal {
    #[default]
    None,
    Help {
        scroll: u16,
    },
    Palette {
        input: Input,
        selected: usize,
    },
    Search {
        input: Input,
    },
    Confirm(Confirm),
    /// The plan of an arm; no lines while it is made.
    Plan {
        arm: String,
        lines: Vec<String>,
        scroll: u16,
    },
}

/// How the charts are seen. Smoothing is kept apart for validation points (few, exact) and steps (many, noisy).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChartView {
    pub metric: Metric,
    pub log_y: bool,
    pub validation_weight: f32,
    pub step_weight: f32,
    /// Steps shown; `None` for all. Shared by all charts.
    pub window: Option<(u64, u64)>,
    /// Step read out on all charts.
    pub cursor: Option<u64>,
}

/// The log pane.
#[derive(Clone, Debug, Default)]
pub struct LogView {
    /// Lines between the bottom of the pane and the newest line; 0 follows.
    pub above_end: usize,
    pub pattern: String,
}

/// A line about what happened, for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub ok: bool,
    pub text: String,
    pub until_ms: u64,
}

/// An arm as the views need it.
pub struct Arm<'a> {
    pub run: &'a RunView,
    /// Its newest job, if it was submitted.
    pub job: Option<&'a JobView>,
    /// Place in the experiment: decides colour and line.
    pub position: usize,
    pub short: String,
    pub state: RunState,
    pub reason: String,
    pub selected: bool,
    /// Are its curves drawn?
    pub drawn: bool,
}

/// The whole state.
pub struct App {
    pub theme: Theme,
    pub read_only: bool,
    pub now_ms: u64,
    pub size: (u16, u16),
    pub pane: Pane,
    pub chart: ChartView,
    pub log: LogView,
    pub modal: Modal,
    pub notice: Option<Notice>,
    pub loading: LoadProgress,
    pub load_error: Option<String>,
    pub snapshot: Option<Arc<ConsoleSnapshot>>,
    pub strip: Option<Result<PictureStrip, String>>,
    selected: String,
    hidden: BTreeSet<String>,
    /// One curve a metric of [`Metric::ALL`], by arm.
    curves: HashMap<String, Vec<Curve>>,
    requested: Option<StripRequest>,
    clip: usize,
    dirty: bool,
    drawn_second: u64,
}

impl App {
    /// An empty console of this size.
    pub fn new(theme: Theme, read_only: bool, size: (u16, u16), now_ms: u64) -> Self {
        Self {
            theme,
            read_only,
            now_ms,
            size,
            pane: Pane::default(),
            chart: ChartView {
                metric: Metric::WristLpips,
                log_y: false,
                validation_weight: 0.0,
                step_weight: 0.9,
                window: None,
                cursor: None,
            },
            log: LogView::default(),
            modal: Modal::None,
            notice: None,
            loading: LoadProgress::default(),
            load_error: None,
            snapshot: None,
            strip: None,
            selected: String::new(),
            hidden: BTreeSet::new(),
            curves: HashMap::new(),
            requested: None,
            clip: 0,
            dirty: true,
            drawn_second: 0,
        }
    }

    /// Has anything visible changed since the last call?
    pub fn take_dirty(&mut self) -> bool {
        std::mem::take(&mut self.dirty)
    }

    /// Takes one message; returns what has to be done, in order.
    pub fn update(&mut self, msg: Msg) -> Vec<Effect> {
        let mut effects = match msg {
            Msg::Tick { now_ms } => {
                self.tick(now_ms);
                return Vec::new();
            }
            Msg::Key(key) if key.kind == KeyEventKind::Release => return Vec::new(),
            Msg::Key(key) => self.key(key),
            Msg::Resize(width, height) => {
                self.size = (width, height);
                Vec::new()
            }
            Msg::Loading(progress) => {
                self.loading = progress;
                Vec::new()
            }
            Msg::Snapshot(snapshot) => {
                self.take_snapshot(snapshot);
                Vec::new()
            }
            Msg::LoadFailed(text) => {
                self.load_error = Some(text);
                Vec::new()
            }
            Msg::Strip(request, strip) => {
                // A late answer to an earlier question is dropped.
                if self.requested.as_ref() == Some(&request) {
                    self.strip = Some(strip);
                }
                Vec::new()
            }
            Msg::Plan { arm, lines } => {
                // Whoever closed it or asked for another arm does not want it any more.
                if let Modal::Plan { arm: asked, lines: shown, .. } = &mut self.modal
                    && *asked == arm
                {
                    *shown = lines;
                }
                Vec::new()
            }
            Msg::EffectResult { ok, text } => {
                self.say(ok, text);
                Vec::new()
            }
            Msg::WorkerDied { thread, message } => vec![Effect::Quit(Leave::Crash(thread, message))],
            Msg::Continued => vec![Effect::Refresh],
            Msg::Suspend => vec![Effect::Suspend],
            Msg::Signal(signal) => vec![Effect::Quit(Leave::Signal(signal))],
            Msg::TerminalLost => vec![Effect::Quit(Leave::TerminalLost)],
        };
        self.dirty = true;
        effects.extend(self.wanted_strip());
        effects
    }

    fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        if self.notice.as_ref().is_some_and(|notice| notice.until_ms <= now_ms) {
            self.notice = None;
            self.dirty = true;
        }
        // The screen carries ages and a clock in seconds; nothing on it moves faster by itself.
        if self.drawn_second != now_ms / 1000 {
            self.drawn_second = now_ms / 1000;
            self.dirty = true;
        }
    }

    fn say(&mut self, ok: bool, text: impl Into<String>) {
        self.notice = Some(Notice { ok, text: text.into(), until_ms: self.now_ms + NOTICE_MS });
    }

    fn take_snapshot(&mut self, snapshot: Arc<ConsoleSnapshot>) {
        self.load_error = None;
        let before = self.selected_run().map(|run| (run.arm.clone(), run.log.len(), run.log.last().cloned()));
        if !snapshot.runs.iter().any(|run| run.arm == self.selected) {
            self.selected = snapshot.runs.first().map(|run| run.arm.clone()).unwrap_or_default();
            self.log.above_end = 0;
        }
        let newest = self.extent().1;
        self.curves.retain(|arm, _| snapshot.runs.iter().any(|run| run.arm == *arm));
        for run in &snapshot.runs {
            let curves =
                self.curves.entry(run.arm.clone()).or_insert_with(|| Metric::ALL.map(Curve::new).into_iter().collect());
            for curve in curves {
                curve.update(run);
            }
        }
        self.snapshot = Some(snapshot);
        self.smooth();
        if let Some((from, to)) = self.chart.window.filter(|(_, to)| *to == newest) {
            let arrived = self.extent().1.saturating_sub(newest);
            self.chart.window = Some((from.saturating_add(arrived), to.saturating_add(arrived)));
        }
        // A reader who scrolled back keeps the lines before his eyes while new ones arrive.
        if let (true, Some((arm, len, last)), Some(run)) = (self.log.above_end > 0, before, self.selected_run())
            && run.arm == arm
        {
            let arrived = match &last {
                Some(last) => run.log.iter().rev().position(|line| line == last).unwrap_or(run.log.len()),
                None => run.log.len().saturating_sub(len),
            };
            self.log.above_end = (self.log.above_end + arrived).min(run.log.len());
        }
    }

    /// Keeps the moving average of the chart's metric up to date; the others need none.
    fn smooth(&mut self) {
        let Some(snapshot) = self.snapshot.clone() else { return };
        for run in &snapshot.runs {
            let Some(curves) = self.curves.get_mut(&run.arm) else { continue };
            for (metric, curve) in Metric::ALL.iter().zip(curves) {
                let shown = *metric == self.chart.metric;
                let weight = if metric.is_validation() { self.chart.validation_weight } else { self.chart.step_weight };
                curve.smooth(if shown { weight } else { 0.0 }, run);
            }
        }
    }

    /// The weight of the moving average of the chart's metric.
    pub fn weight(&self) -> f32 {
        if self.chart.metric.is_validation() { self.chart.validation_weight } else { self.chart.step_weight }
    }

    fn runs(&self) -> &[Arc<RunView>] {
        self.snapshot.as_ref().map_or(&[], |snapshot| snapshot.runs.as_slice())
    }

    /// All arms in the experiment's order.
    pub fn arms(&self) -> Vec<Arm<'_>> {
        let names: Vec<&str> = self.runs().iter().map(|run| run.arm.as_str()).collect();
        let short = status::short_names(&names);
        let arms = self.runs().iter().zip(short).enumerate().map(|(position, (run, short))| {
            let job = self.job(&run.arm);
            let (state, reason) = judge(run, self.now_ms, job);
            Arm {
                run,
                job,
                position,
                short,
                state,
                reason,
                selected: run.arm == self.selected,
                drawn: !self.hidden.contains(&run.arm),
            }
        });
        arms.collect()
    }

    /// The newest job of an arm, as far as Slurm was asked.
    pub fn job(&self, arm: &str) -> Option<&JobView> {
        self.snapshot.as_ref()?.slurm.jobs.get(arm)
    }

    /// The selected arm's run.
    pub fn selected_run(&self) -> Option<&RunView> {
        self.runs().iter().find(|run| run.arm == self.selected).map(Arc::as_ref)
    }

    /// The prepared curve of an arm.
    pub fn curve(&self, arm: &str, metric: Metric) -> Option<&Curve> {
        let index = Metric::ALL.iter().position(|candidate| *candidate == metric)?;
        self.curves.get(arm)?.get(index)
    }

    /// First and last step of all charts.
    pub fn extent(&self) -> (u64, u64) {
        let last = self.runs().iter().flat_map(|run| {
            let validated = run.validations.iter().map(|point| point.event.step);
            run.series.step.last().copied().into_iter().chain(validated)
        });
        (0, last.max().unwrap_or(0).max(1))
    }

    /// Steps that the charts show.
    pub fn window(&self) -> (u64, u64) {
        self.chart.window.unwrap_or_else(|| self.extent())
    }

    fn key(&mut self, key: KeyEvent) -> Vec<Effect> {
        // Ctrl-C leaves whatever is open: the one key that people press when nothing else seems to work.
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return vec![Effect::Quit(Leave::ByUser)];
        }
        match std::mem::take(&mut self.modal) {
            Modal::None => match keys::action(key, self.pane.context()) {
                Some(action) => self.act(action),
                None => Vec::new(),
            },
            Modal::Help { scroll } => {
                self.modal = match key.code {
                    KeyCode::Down | KeyCode::Char('j') => Modal::Help { scroll: scroll.saturating_add(1) },
                    KeyCode::Up | KeyCode::Char('k') => Modal::Help { scroll: scroll.saturating_sub(1) },
                    KeyCode::PageDown | KeyCode::Char(' ') => Modal::Help { scroll: scroll.saturating_add(10) },
                    KeyCode::PageUp => Modal::Help { scroll: scroll.saturating_sub(10) },
                    _ => Modal::None,
                };
                Vec::new()
            }
            Modal::Plan { arm, lines, scroll } => {
                let to = match key.code {
                    KeyCode::Down | KeyCode::Char('j') => Some(scroll.saturating_add(1)),
                    KeyCode::Up | KeyCode::Char('k') => Some(scroll.saturating_sub(1)),
                    KeyCode::PageDown | KeyCode::Char(' ') => Some(scroll.saturating_add(10)),
                    KeyCode::PageUp => Some(scroll.saturating_sub(10)),
                    _ => None,
                };
                let most = u16::try_from(lines.len()).unwrap_or(u16::MAX);
                self.modal = to.map_or(Modal::None, |to| Modal::Plan { arm, lines, scroll: to.min(most) });
                Vec::new()
            }
            Modal::Palette { input, selected } => self.palette_key(key, input, selected),
            Modal::Search { input } => self.search_key(key, input),
            Modal::Confirm(confirm) => self.confirm_key(key, confirm),
        }
    }

    fn palette_key(&mut self, key: KeyEvent, mut input: Input, mut selected: usize) -> Vec<Effect> {
        let found = keys::matching(input.value(), self.read_only);
        match key.code {
            KeyCode::Esc => return Vec::new(),
            KeyCode::Enter => {
                return match found.get(selected) {
                    Some(binding) => self.act(binding.action),
                    None => Vec::new(),
                };
            }
            KeyCode::Down | KeyCode::Tab => selected = (selected + 1).min(found.len().saturating_sub(1)),
            KeyCode::Up | KeyCode::BackTab => selected = selected.saturating_sub(1),
            _ => {
                if edit(&mut input, key) {
                    selected = 0;
                }
            }
        }
        self.modal = Modal::Palette { input, selected };
        Vec::new()
    }

    fn search_key(&mut self, key: KeyEvent, mut input: Input) -> Vec<Effect> {
        match key.code {
            KeyCode::Esc => self.log.pattern.clear(),
            KeyCode::Enter => {
                self.log.pattern = input.value().to_owned();
                self.log.above_end = 0;
                self.find(true);
            }
            _ => {
                edit(&mut input, key);
                self.log.pattern = input.value().to_owned();
                self.modal = Modal::Search { input };
            }
        }
        Vec::new()
    }

    /// Moves the log to the match before (`up`) or after the bottom line; says so if there is none.
    fn find(&mut self, up: bool) {
        let Some(run) = self.selected_run() else { return };
        if self.log.pattern.is_empty() {
            self.say(false, "nothing to search for: / takes a pattern");
            return;
        }
        let matches = |line: &crate::runlog::LogLine| contains(&line.text, &self.log.pattern);
        let bottom = run.log.len().saturating_sub(self.log.above_end);
        let found = if up {
            let end = if self.log.above_end == 0 { bottom } else { bottom.saturating_sub(1) };
            run.log.iter().take(end).rposition(matches)
        } else {
            run.log.iter().skip(bottom).position(matches).map(|index| bottom + index)
        };
        match found {
            Some(index) => self.log.above_end = run.log.len() - index - 1,
            None => {
                let pattern = self.log.pattern.clone();
                self.say(false, format!("no {} line has \"{pattern}\"", if up { "earlier" } else { "later" }));
            }
        }
    }

    fn act(&mut self, action: Action) -> Vec<Effect> {
        match action {
            Action::PreviousArm => self.select(|position, _| position.saturating_sub(1)),
            Action::NextArm => self.select(|position, count| (position + 1).min(count.saturating_sub(1))),
            Action::FirstArm => self.select(|_, _| 0),
            Action::LastArm => self.select(|_, count| count.saturating_sub(1)),
            Action::ToggleMark => {
                if !self.hidden.remove(&self.selected) {
                    self.hidden.insert(self.selected.clone());
                }
            }
            Action::NextPane | Action::PreviousPane => {
                let position = Pane::ALL.iter().position(|pane| *pane == self.pane).unwrap_or(0);
                let step = if action == Action::NextPane { 1 } else { Pane::ALL.len() - 1 };
                self.pane = Pane::ALL[(position + step) % Pane::ALL.len()];
            }
            Action::NextMetric | Action::PreviousMetric => {
                let count = Metric::ALL.len();
                let position = Metric::ALL.iter().position(|metric| *metric == self.chart.metric).unwrap_or(0);
                let step = if action == Action::NextMetric { 1 } else { count - 1 };
                self.chart.metric = Metric::ALL[(position + step) % count];
                self.smooth();
            }
            Action::Smoothing => {
                let current = self.weight();
                let position = SMOOTHING.iter().position(|weight| *weight == current).unwrap_or(0);
                let weight = SMOOTHING[(position + 1) % SMOOTHING.len()];
                if self.chart.metric.is_validation() {
                    self.chart.validation_weight = weight;
                } else {
                    self.chart.step_weight = weight;
                }
                self.smooth();
            }
            Action::LogY => self.chart.log_y = !self.chart.log_y,
            Action::ZoomIn => self.zoom(true),
            Action::ZoomOut => self.zoom(false),
            Action::PanLeft => self.pan(false),
            Action::PanRight => self.pan(true),
            Action::ResetZoom => self.chart.window = None,
            Action::CursorLeft => self.move_cursor(false),
            Action::CursorRight => self.move_cursor(true),
            Action::PreviousClip => self.clip = self.clip.saturating_sub(1),
            Action::NextClip => self.next_clip(),
            Action::LogUp => self.scroll(1),
            Action::LogDown => self.scroll(-1),
            Action::LogPageUp => self.scroll(10),
            Action::LogPageDown => self.scroll(-10),
            Action::LogFollow => self.log.above_end = 0,
            Action::Search => {
                self.pane = Pane::Log;
                self.modal = Modal::Search { input: Input::default() };
            }
            Action::SearchNext => self.find(false),
            Action::SearchPrevious => self.find(true),
            Action::Stop => self.ask(Deed::Stop),
            Action::Kill => self.ask(Deed::Kill),
            Action::Resume => self.ask(Deed::Resume),
            Action::Refresh => return vec![Effect::Refresh],
            Action::Suspend => return vec![Effect::Suspend],
            Action::Plan => {
                let Some(arm) = self.selected_run().map(|run| run.arm.clone()) else { return Vec::new() };
                self.modal = Modal::Plan { arm: arm.clone(), lines: Vec::new(), scroll: 0 };
                return vec![Effect::Plan { arm }];
            }
            Action::Help => self.modal = Modal::Help { scroll: 0 },
            Action::Palette => self.modal = Modal::Palette { input: Input::default(), selected: 0 },
            Action::Back => {
                if self.chart.cursor.take().is_none() {
                    self.log.pattern.clear();
                }
                self.notice = None;
            }
            Action::Leave => return vec![Effect::Quit(Leave::ByUser)],
        }
        Vec::new()
    }

    fn select(&mut self, step: impl Fn(usize, usize) -> usize) {
        let position = self.runs().iter().position(|run| run.arm == self.selected).unwrap_or(0);
        if let Some(run) = self.runs().get(step(position, self.runs().len())) {
            let arm = run.arm.clone();
            if arm != self.selected {
                self.selected = arm;
                self.log.above_end = 0;
            }
        }
    }

    fn scroll(&mut self, lines: isize) {
        let count = self.selected_run().map_or(0, |run| run.log.len());
        self.log.above_end = self.log.above_end.saturating_add_signed(lines).min(count.saturating_sub(1));
    }

    /// Halves or doubles the steps shown, around the cursor if it's in view, else towards the newest step.
    fn zoom(&mut self, closer: bool) {
        let (first, last) = self.extent();
        let (from, to) = self.window();
        let span = to.saturating_sub(from).max(1);
        let target = if closer { (span / 2).max(8) } else { span.saturating_mul(2) };
        if target >= last - first {
            self.chart.window = None;
            return;
        }
        let centre = self.chart.cursor.filter(|cursor| (from..=to).contains(cursor));
        let from = match centre {
            Some(cursor) => cursor.saturating_sub(target / 2),
            // Who looks at the newest steps goes on looking at them.
            None if to >= last => last - target,
            None => (from + span / 2).saturating_sub(target / 2),
        };
        let from = from.clamp(first, last - target);
        self.chart.window = Some((from, from + target));
    }

    fn pan(&mut self, right: bool) {
        let (first, last) = self.extent();
        let Some((from, to)) = self.chart.window else {
            self.say(false, "all steps are in view: + zooms in");
            return;
        };
        let span = to.saturating_sub(from);
        let shift = (span / 4).max(1);
        let from = if right { from.saturating_add(shift) } else { from.saturating_sub(shift) };
        let from = from.clamp(first, last.saturating_sub(span).max(first));
        self.chart.window = Some((from, from + span));
    }

    /// Moves the cursor: from one validation to the next on a validation chart, else by a hundredth of the window.
    fn move_cursor(&mut self, right: bool) {
        let (from, to) = self.window();
        let Some(cursor) = self.chart.cursor else {
            self.chart.cursor = Some(self.extent().1.min(to));
            return;
        };
        let moved = if self.chart.metric.is_validation() {
            let steps = self.runs().iter().flat_map(|run| run.validations.iter().map(|point| point.event.step));
            if right {
                steps.filter(|step| *step > cursor).min().unwrap_or(cursor)
            } else {
                steps.filter(|step| *step < cursor).max().unwrap_or(cursor)
            }
        } else {
            let step = (to.saturating_sub(from) / 100).max(1);
            if right { cursor.saturating_add(step) } else { cursor.saturating_sub(step) }
        };
        self.chart.cursor = Some(moved.clamp(from, to));
    }
}

/// Feeds a key to a line of text; was it one that edits?
fn edit(input: &mut Input, key: KeyEvent) -> bool {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    let request = match key.code {
        KeyCode::Char('u') if control => InputRequest::DeleteLine,
        KeyCode::Char('w') if control => InputRequest::DeletePrevWord,
        KeyCode::Char(c) if !control && !key.modifiers.contains(KeyModifiers::ALT) => InputRequest::InsertChar(c),
        KeyCode::Backspace => InputRequest::DeletePrevChar,
        KeyCode::Delete => InputRequest::DeleteNextChar,
        KeyCode::Left => InputRequest::GoToPrevChar,
        KeyCode::Right => InputRequest::GoToNextChar,
        KeyCode::Home => InputRequest::GoToStart,
        KeyCode::End => InputRequest::GoToEnd,
        _ => return false,
    };
    input.handle(request);
    true
}

/// Does `text` contain `pattern`, ignoring case?
pub fn contains(text: &str, pattern: &str) -> bool {
    text.to_lowercase().contains(&pattern.to_lowercase())
}
