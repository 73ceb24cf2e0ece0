//! `report`, and the verdict that `run` ends with and the console shows: one judgement over the run directories.

use super::arguments::{Global, ReportArguments};
use super::output;
use crate::config::Experiment;
use crate::console::{Decision as Shown, VerdictSource, VerdictView};
use crate::eval::verdict::{
    ArmWork, Decision, Plan, Record, SCOPE, Verdict, at_equal_work, confounders, judge, load_points, seams,
    unequal_work,
};
use crate::runlog::{ExperimentRuns, RunReader, RunState, RunView, now_ms};
use crate::{Exit, Result};
use std::sync::Arc;

/// Lines are this wide where there is no terminal to ask.
const WIDTH: usize = 100;

/// Prints the trajectories and the verdict.
pub fn report(arguments: &ReportArguments, global: &Global) -> Result<Exit> {
    let experiment = Experiment::load(&arguments.experiment)?;
    let summary = VerdictSummary::form_with(&experiment, arguments.equal_work)?;
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
        Self::form_with(experiment, false)
    }

    /// The same, step by step or, with `equal_work`, at equal numbers of samples at full learning rate.
    fn form_with(experiment: &Experiment, equal_work: bool) -> Result<Self> {
        let runs = ExperimentRuns::new(&experiment.directory);
        let read = |arm: &str| {
            let mut reader = RunReader::open(runs.run(arm).root());
            reader.poll(now_ms()).map(|_| reader)
        };
        let (baseline, candidate) = (read(&experiment.rule.baseline)?, read(&experiment.rule.candidate)?);
        let views = [baseline.view(), candidate.view()];
        Ok(Self { verdict: judge_runs(experiment, views, equal_work)? })
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
        let find = |arm: &str| views.iter().find(|view| view.arm == arm).map(AsRef::as_ref);
        let (baseline, candidate) = (find(&experiment.rule.baseline)?, find(&experiment.rule.candidate)?);
        let verdict = judge_runs(&experiment, [baseline, candidate], false).ok()?;
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

/// Judges the deciding arms by their points, and by their records whether they may be compared.
fn judge_runs(experiment: &Experiment, views: [&RunView; 2], equal_work: bool) -> Result<Verdict> {
    let runs = ExperimentRuns::new(&experiment.directory);
    let rule = &experiment.rule;
    let names = [&rule.baseline, &rule.candidate];
    let [baseline, mut candidate] = names.map(|arm| load_points(runs.run(arm).root()));
    let work = views.map(ArmWork::of);
    let mut plan = plan(experiment, Some(views[0]));
    if let [Some(left), Some(right)] = [Record::read(&runs.run(names[0]))?, Record::read(&runs.run(names[1]))?] {
        plan.confounders = confounders(&experiment.ablated, &left, &right);
    }
    let mut notes: Vec<String> = views.iter().flat_map(|view| seams(view)).collect();
    if equal_work {
        let (moved, pairs) = at_equal_work(&work[0], &work[1], &candidate?);
        candidate = Ok(moved);
        let planned = plan.steps.len();
        plan.steps.retain(|step| pairs.iter().any(|(partner, _)| partner == step));
        let list = pairs.iter().map(|(step, other)| format!("{step} with {other}")).collect::<Vec<_>>().join(", ");
        notes.push(format!(
            "compared at equal samples at full learning rate, {} of {planned} points: steps {list}",
            plan.steps.len()
        ));
    } else {
        notes.extend(unequal_work(&work[0], &work[1]));
    }
    let mut verdict = judge(rule, &plan, &baseline?, &candidate?)?;
    verdict.work = work.into();
    verdict.notes.extend(notes);
    Ok(verdict)
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
