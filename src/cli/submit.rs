//! `submit`: arms into Slurm's queue, each as a job of its own.

use super::arguments::{Global, SubmitArguments};
use super::recorded::recorded_overrides;
use super::session::this_program;
use super::{allow_writing, code_version, output};
use crate::config::Experiment;
use crate::control::{SubmitCommand, WorkerCommand};
use crate::runlog::{ExperimentRuns, check_binding};
use crate::slurm::Slurm;
use crate::train::worker::known_identity;
use crate::{Error, Exit, Result};
use serde_json::json;

/// Submits each arm, or shows the script with `--dry-run`; the first that is refused gives the exit code, after all were
/// tried.
pub fn submit(arguments: &SubmitArguments, global: &Global) -> Result<Exit> {
    if !arguments.dry_run {
        allow_writing(global, "submitting a job")?;
    }
    let plain = Experiment::load(&arguments.experiment)?;
    let chosen: Vec<String> = match &arguments.arm[..] {
        [] => plain.arms.iter().map(|arm| arm.name.clone()).collect(),
        named => named.iter().map(|name| plain.arm(name).map(|arm| arm.name.clone())).collect::<Result<_>>()?,
    };
    // A run goes on as it was started, unless told otherwise.
    let given = (!arguments.overrides.texts().is_empty()).then(|| arguments.overrides.clone());
    let overrides = match given {
        Some(given) => given,
        None => recorded_overrides(&plain.directory, &chosen)?.unwrap_or_default(),
    };
    let experiment = Experiment::load_with(&arguments.experiment, &overrides.texts())?;
    let accepted = &arguments.acceptance.accept_change;
    let accepting = accepted.iter().flat_map(|field| ["--accept-change".to_owned(), field.clone()]);
    let worker_arguments = overrides.arguments().into_iter().chain(accepting).collect();
    let command = command_of(&experiment, worker_arguments, &chosen)?;
    for warning in command.warnings()? {
        output::note(format!("warning: {warning}"));
    }
    let runs = ExperimentRuns::new(&experiment.directory);
    let mut first_failure = None;
    let mut documents = Vec::new();
    for arm in &chosen {
        let text = experiment.arm(arm)?.recipe.to_yaml();
        let known = known_identity(&experiment.name, arm, &code_version());
        let bound = check_binding(&runs.run(arm), &text, &known, accepted);
        let done = bound.and_then(|_| match arguments.dry_run {
            true => command.script(arm).map(|script| (script.to_string(), None)),
            false => command.submit(arm, &Slurm::default(), "lbva-tui submit").map(|job| (String::new(), Some(job))),
        });
        match done {
            Ok((script, job)) => {
                documents.push(json!({"arm": arm, "job": job, "script": (!script.is_empty()).then_some(&script)}));
                match job {
                    _ if global.json => {}
                    Some(job) => output::line(format!("{arm}: submitted as job {job}"))?,
                    None => output::line(format!("# {arm}: would be submitted as\n{script}"))?,
                }
            }
            Err(error) => {
                output::warn(&error);
                documents.push(json!({"arm": arm, "error": output::as_json(&error)}));
                first_failure.get_or_insert(error.exit);
            }
        }
    }
    if global.json {
        output::document(&json!({"arms": documents}))?;
    }
    Ok(first_failure.unwrap_or(Exit::Done))
}

/// How this experiment's arms are submitted.
///
/// # Errors
/// `no_slurm` (exit 78) if the experiment has no `slurm:` block.
pub fn command_of(experiment: &Experiment, arguments: Vec<String>, arms: &[String]) -> Result<SubmitCommand> {
    let settings = experiment.slurm.clone().ok_or_else(|| {
        Error::refused("no_slurm", "experiment.yaml has no slurm: block")
            .at(&experiment.directory)
            .hint("say there what to ask for, as in `slurm: {partition: extra, gpus: 8, time: \"4:00:00\"}`")
    })?;
    let worker = WorkerCommand {
        executable: this_program()?,
        experiment: experiment.directory.clone(),
        arguments,
        arms: arms.to_vec(),
    };
    Ok(SubmitCommand { worker, name: experiment.name.clone(), settings })
}
