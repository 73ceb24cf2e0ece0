//! `plan`: how often to save, how many tries, how many hours, from attempts that were seen and from what the run measured.

use super::arguments::{Global, PlanArguments};
use super::output;
use crate::config::Experiment;
use crate::console::PlanSource;
use crate::plan::{Costs, Lifetime, Plan, from_csv, from_rows};
use crate::runlog::{ExperimentRuns, RunReader, RunView, now_ms};
use crate::slurm::{Scheduler, Slurm};
use crate::{Error, Exit, Result};
use serde_json::json;
use std::sync::Arc;

/// How far back attempts are looked for.
pub const DAYS: u32 = 14;
/// Of a queue that nobody has measured.
const WAIT_S: f64 = 600.0;

pub fn plan(arguments: &PlanArguments, global: &Global) -> Result<Exit> {
    let experiment = Experiment::load(&arguments.experiment)?;
    let Planned { arm, source, plan, save_every } = make(arguments, &experiment)?;
    if global.json {
        let plan = serde_json::to_value(&plan).map_err(|error| Error::crash(format!("the plan: {error}")))?;
        output::document(&json!({"arm": arm, "source": source, "plan": plan, "save_every": save_every}))?;
        return Ok(Exit::Done);
    }
    output::line(format!("{arm}, from {source}"))?;
    plan.lines().into_iter().try_for_each(output::line)?;
    if plan.recommended != save_every {
        output::line(format!("train.save_every is {save_every} now"))?;
    }
    Ok(Exit::Done)
}

/// Plans arms for the console, from the partition of the experiment's `slurm:` block and what the run has measured.
pub fn source(experiment: Experiment) -> PlanSource {
    Arc::new(move |arm| {
        let arguments = PlanArguments {
            experiment: experiment.directory.clone(),
            arm: Some(arm.to_owned()),
            partition: None,
            csv: None,
            min_gpus: None,
            days: DAYS,
            steps: None,
            step_seconds: None,
            blocked_seconds: None,
            durable_seconds: None,
            startup_seconds: None,
            wait_seconds: None,
            seed: 1,
        };
        let planned = make(&arguments, &experiment)?;
        let from = std::iter::once(format!("from {}", planned.source));
        Ok(from.chain(planned.plan.lines()).collect())
    })
}

struct Planned {
    arm: String,
    /// Where the attempts are from.
    source: String,
    plan: Plan,
    /// The present interval.
    save_every: u64,
}

fn make(arguments: &PlanArguments, experiment: &Experiment) -> Result<Planned> {
    let arm = experiment.arm(arguments.arm.as_deref().unwrap_or(&experiment.rule.baseline))?;
    let mut reader = RunReader::open(ExperimentRuns::new(&experiment.directory).run(&arm.name).root());
    reader.poll(now_ms())?;
    let train = arm.recipe.train();
    let costs = costs(arguments, reader.view(), train.steps)?;
    let (lifetimes, source) = lifetimes(arguments, experiment)?;
    let plan = Plan::make(&lifetimes, costs, Some(train.save_every), arguments.seed)?;
    Ok(Planned { arm: arm.name.clone(), source, plan, save_every: train.save_every })
}

/// The attempts to learn from, and where they are from.
fn lifetimes(arguments: &PlanArguments, experiment: &Experiment) -> Result<(Vec<Lifetime>, String)> {
    if let Some(path) = &arguments.csv {
        return Ok((from_csv(path)?, path.display().to_string()));
    }
    let settings = experiment.slurm.clone().unwrap_or_default();
    let partition = arguments.partition.clone().or(settings.partition).ok_or_else(|| {
        Error::usage("no_source", "no attempts to learn from")
            .hint("name a partition with --partition, or a table with --csv")
    })?;
    let gpus = arguments.min_gpus.unwrap_or(u64::from(settings.gpus.unwrap_or(0)));
    let text = Slurm::default().history(&partition, arguments.days)?;
    let source = format!("{} days of partition {partition}, jobs of {gpus} GPUs or more", arguments.days);
    Ok((from_rows(&text, gpus)?, source))
}

/// What was measured, unless it is given.
fn costs(arguments: &PlanArguments, view: &RunView, steps: u64) -> Result<Costs> {
    let measured = |given: Option<f64>, measured: Option<f64>, option: &str| {
        given.or(measured).ok_or_else(|| {
            Error::usage("not_measured", format!("{option} is needed: the run has not measured it yet"))
                .in_place(option)
        })
    };
    let save = view.save_cost();
    let blocked_s = measured(arguments.blocked_seconds, save.map(|save| save.blocked_ms / 1e3), "--blocked-seconds")?;
    let durable_s = arguments.durable_seconds.or(save.map(|save| save.durable_ms / 1e3)).unwrap_or(blocked_s);
    Ok(Costs {
        step_s: measured(arguments.step_seconds, view.median_step_ms().map(|ms| ms / 1e3), "--step-seconds")?,
        blocked_s,
        durable_s: durable_s.max(blocked_s),
        startup_s: measured(arguments.startup_seconds, view.startup_ms().map(|ms| ms / 1e3), "--startup-seconds")?,
        wait_s: arguments.wait_seconds.unwrap_or(WAIT_S),
        steps: arguments.steps.unwrap_or(steps),
    })
}
