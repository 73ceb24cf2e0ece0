//! `report`, and the verdict that `run` ends with and the console shows: one judgement over the run directories.

use super::arguments::{Global, ReportArguments};
use super::output;
use crate::config::Experiment;
use crate::console::{Decision as Shown, VerdictSource, VerdictView};
use crate::eval::verdict::{Decision, Plan, SCOPE, Verdict, judge, load_points};
use crate::runlog::{ExperimentRuns, RunReader, RunState, RunView, now_ms};
use crate::{Exit, Result};
use std::sync::Arc;

/// Lines are this wide where there is no terminal to ask.
const WIDTH: usize = 100;

/// Prints the trajectories and the verdict.
pub fn report(arguments: &ReportArguments, global: &Global) -> Result<Exit> {
    let experiment = Experiment::load(&arguments.experiment)?;
    let summary = VerdictSummary::form(&experiment)?;
    if global.json {
        output::document(&summary.verdict)?;
    } else {
        output::line(&experiment.question)?;
        output::line("")?;
        output::line(summary.text().trim_end())?;
        failed_jobs(&experiment)?.into_iter().try_for_each(output::line)?;
    }
    Ok(Exit::Done)
}

/// Arms whose job is over and whose run failed, a line each: what Slurm recorded may say otherwise.
fn failed_jobs(experiment: &Experiment) -> Result<Vec<String>> {
    let runs = ExperimentRuns::new(&experiment.directory);
    let look = super::open::jobs(&runs)?;
    let mut lines = Vec::new();
    for (arm, job) in &look.jobs {
        let mut reader = RunReader::open(runs.run(arm).root());
        reader.poll(now_ms())?;
        if let (RunState::Failed, reason) = crate::slurm::judge(reader.view(), now_ms(), Some(job)) {
            lines.push(format!("{arm} failed: {reason}"));
        }
    }
    Ok(lines)
}

/// A verdict and how to say it.
pub struct VerdictSummary {
    pub verdict: Verdict,
}

impl VerdictSummary {
    /// Reads both deciding arms' validation points and judges them.
    pub fn form(experiment: &Experiment) -> Result<Self> {
        let runs = ExperimentRuns::new(&experiment.directory);
        let mut reader = RunReader::open(runs.run(&experiment.rule.baseline).root());
        reader.poll(now_ms())?;
        Ok(Self { verdict: judge_with(experiment, &plan(experiment, Some(reader.view())))? })
    }

    /// For a terminal, as wide as it is.
    pub fn text(&self) -> String {
        let width = crossterm::terminal::size().map_or(WIDTH, |(columns, _)| usize::from(columns));
        self.verdict.render_text(width.clamp(40, 160))
    }
}

/// Points that a complete run of this experiment has.
pub fn planned_points(experiment: &Experiment) -> u64 {
    plan(experiment, None).steps.len() as u64
}

/// Forms the console's verdict whenever validation points were added.
pub fn source(experiment: Experiment) -> VerdictSource {
    Box::new(move |views: &[Arc<RunView>]| {
        let baseline = views.iter().find(|view| view.arm == experiment.rule.baseline);
        let verdict = judge_with(&experiment, &plan(&experiment, baseline.map(AsRef::as_ref))).ok()?;
        let decision = match verdict.decision {
            Decision::Better => Shown::Better,
            Decision::Worse => Shown::Worse,
            Decision::Undecided => Shown::Undecided,
            Decision::Pending => Shown::Pending,
        };
        let note = if verdict.difference.is_some() { SCOPE.to_owned() } else { String::new() };
        Some(VerdictView { headline: verdict.headline(), note, decision })
    })
}

fn judge_with(experiment: &Experiment, plan: &Plan) -> Result<Verdict> {
    let runs = ExperimentRuns::new(&experiment.directory);
    let points = |arm: &str| load_points(runs.run(arm).root());
    judge(&experiment.rule, plan, &points(&experiment.rule.baseline)?, &points(&experiment.rule.candidate)?)
}

/// What was to be measured: by the run's own record where there is one, since `--steps` may have shortened it.
fn plan(experiment: &Experiment, baseline: Option<&RunView>) -> Plan {
    let recorded = baseline.and_then(RunView::attempt).map(|attempt| &attempt.started);
    let recipe = experiment.arms.iter().find(|arm| arm.name == experiment.rule.baseline).map(|arm| &arm.recipe);
    let (steps, every) = match (recorded, recipe) {
        (Some(started), _) => (started.total_steps, started.validate_every),
        (None, Some(recipe)) => (recipe.train().steps, recipe.validate_every()),
        (None, None) => (0, 1),
    };
    Plan::new(steps, every, experiment.arms_start_equal())
}
