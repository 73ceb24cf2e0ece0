//! `data tokens`: a cache of geometry tokens read whole, and compared with caches that should be equal or should differ.

use super::arguments::{Global, TokenArguments};
use super::output;
use crate::data::token_check::{Coupling, Repeat, TokenSummary, coupling, inspect, repeat};
use crate::words::thousands;
use crate::{Error, Exit, Result};
use serde::Serialize;

#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    summary: TokenSummary,
    repeat: Option<Repeat>,
    coupling: Option<Coupling>,
    problems: Vec<serde_json::Value>,
}

/// Exit 0 without problems, else that of the first.
pub fn check_tokens(arguments: &TokenArguments, global: &Global) -> Result<Exit> {
    let (summary, mut problems) = inspect(&arguments.dataset)?;
    let mut keep = |problem: Error| problems.push(problem);
    let repeated = arguments.repeat.as_ref().map(|other| repeat(&arguments.dataset, other));
    let repeated = repeated.and_then(|found| found.map_err(&mut keep).ok());
    let coupled = match &arguments.replaced {
        None => None,
        Some(text) => {
            let (view, other) = text.split_once('=').ok_or_else(|| {
                Error::usage("usage", "not of the form VIEW=DATASET").in_place(format!("--replaced {text}"))
            })?;
            coupling(&arguments.dataset, view, other.as_ref()).map_err(&mut keep).ok()
        }
    };
    if global.json {
        let problems = problems.iter().map(output::as_json).collect();
        output::document(&Document { summary, repeat: repeated, coupling: coupled, problems })?;
    } else {
        let (episodes, frames) = (thousands(summary.episodes as u64), thousands(summary.frames as u64));
        let info = &summary.info;
        let weights = info.weights_sha256.as_ref().map_or("no weights".to_owned(), |hash| format!("weights {hash}"));
        let [height, width] = info.input_size;
        let mut rows = vec![
            ("encoder".to_owned(), format!("{}, {weights}, pictures of {width} x {height}", info.encoder)),
            ("views".to_owned(), info.views.join(", ")),
            ("tokens".to_owned(), format!("of {frames} frames in {episodes} episodes")),
            ("sha256".to_owned(), summary.sha256),
        ];
        if let Some(repeat) = &repeated {
            rows.push((
                "repeated".to_owned(),
                format!("{} frames, equal in every bit", thousands(repeat.frames as u64)),
            ));
        }
        if let Some(coupling) = &coupled {
            let list = coupling.change.iter().map(|(view, change)| format!("{view} by {:.1} %", 100.0 * change));
            rows.push((format!("without {}", coupling.replaced), list.collect::<Vec<_>>().join(", ")));
        }
        output::columns(&rows).into_iter().try_for_each(output::line)?;
    }
    problems.iter().for_each(output::warn);
    Ok(problems.first().map_or(Exit::Done, |problem| problem.exit))
}
