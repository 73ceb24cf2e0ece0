//! Attempts as they were seen: from accounting, or from a table that somebody made.

use crate::{Error, Result};
use std::path::Path;

/// One attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lifetime {
    /// From its allocation to its end (so far, if it still runs).
    pub seconds: f64,
    /// It was ended by preemption or by the loss of its node; else it ended for another reason, and only lived at least
    /// so long.
    pub preempted: bool,
    /// When it ended, Unix s.
    pub ended_s: Option<u64>,
}

/// Rows of `sacct -n -P -D -X -o JobIDRaw,User,QOS,State,ExitCode,Start,End,ElapsedRaw,ReqTRES,TimelimitRaw` of attempts
/// with at least `min_gpus`.
///
/// # Errors
/// `slurm_format` (exit 69) if a row has other fields.
pub fn from_rows(text: &str, min_gpus: u64) -> Result<Vec<Lifetime>> {
    let mut lifetimes = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split('|').collect();
        let [_, _, _, state, exit_code, _, end, elapsed, resources, _] = fields[..] else {
            return Err(Error::new(crate::Exit::Unavailable, "slurm_format", "sacct printed a row without 10 fields")
                .in_place(line));
        };
        let gpus =
            resources.split(',').find_map(|part| part.strip_prefix("gres/gpu=")?.parse::<u64>().ok()).unwrap_or(0);
        let seconds: f64 = elapsed.parse().unwrap_or(0.0);
        let state = state.split_whitespace().next().unwrap_or_default();
        if gpus < min_gpus || seconds <= 0.0 || state == "PENDING" {
            continue;
        }
        // A worker that requeued itself in its grace time was preempted; one that failed and was requeued was not.
        let preempted = matches!(state, "PREEMPTED" | "NODE_FAIL") || (state == "REQUEUED" && exit_code == "0:0");
        lifetimes.push(Lifetime { seconds, preempted, ended_s: end.parse().ok() });
    }
    Ok(lifetimes)
}

/// A table with a header: `seconds` or `hours`, `preempted` (1 or 0), and if known `ended` (Unix s).
///
/// # Errors
/// `bad_table` (exit 65) with the line.
pub fn from_csv(path: &Path) -> Result<Vec<Lifetime>> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::data("unreadable", format!("the table cannot be read: {error}")).at(path))?;
    parse_csv(&text).map_err(|error| {
        let place = format!("{}, {}", path.display(), error.place);
        error.in_place(place)
    })
}

fn parse_csv(text: &str) -> Result<Vec<Lifetime>> {
    let bad = |line: usize, what: String| Error::data("bad_table", what).in_place(format!("line {line}"));
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    let (_, header) = lines.next().ok_or_else(|| bad(1, "the table is empty".to_owned()))?;
    let names: Vec<&str> = header.split(',').map(str::trim).collect();
    let column = |name: &str| names.iter().position(|it| *it == name);
    let (time, unit) = match (column("seconds"), column("hours")) {
        (Some(column), _) => (column, 1.0),
        (None, Some(column)) => (column, 3600.0),
        (None, None) => return Err(bad(1, format!("a column seconds or hours is needed, found {header}"))),
    };
    let preempted =
        column("preempted").ok_or_else(|| bad(1, format!("a column preempted is needed, found {header}")))?;
    let ended = column("ended");
    let mut lifetimes = Vec::new();
    for (index, line) in lines {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |column: usize| fields.get(column).copied().unwrap_or_default();
        let value: f64 = field(time).parse().map_err(|_| bad(index + 1, format!("{:?} is no time", field(time))))?;
        if !(value.is_finite() && value >= 0.0) {
            return Err(bad(index + 1, format!("{value} is no time")));
        }
        let preempted = match field(preempted) {
            "1" | "true" | "yes" => true,
            "0" | "false" | "no" => false,
            other => return Err(bad(index + 1, format!("preempted must be 1 or 0, found {other:?}"))),
        };
        let ended_s = ended.and_then(|column| field(column).parse().ok());
        lifetimes.push(Lifetime { seconds: value * unit, preempted, ended_s });
    }
    Ok(lifetimes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounting_tells_preemptions_from_other_ends() {
        let row = |state: &str, code: &str, elapsed: u32, gpus: u32| {
            format!("7|anna|extra|{state}|{code}|1|100|{elapsed}|cpu=8,gres/gpu={gpus},node=1|240\n")
        };
        let text: String = [
            row("PREEMPTED", "0:0", 60, 8),
            row("NODE_FAIL", "0:0", 61, 8),
            row("REQUEUED", "0:0", 62, 8),
            row("REQUEUED", "4:0", 63, 8),
            row("CANCELLED by 0", "0:0", 64, 8),
            row("RUNNING", "0:0", 65, 16),
            row("PREEMPTED", "0:0", 66, 4),
            row("PREEMPTED", "0:0", 0, 8),
            row("PENDING", "0:0", 0, 8),
        ]
        .concat();
        let seen: Vec<(f64, bool)> = from_rows(&text, 8).unwrap().iter().map(|it| (it.seconds, it.preempted)).collect();
        assert_eq!(seen, [(60.0, true), (61.0, true), (62.0, true), (63.0, false), (64.0, false), (65.0, false)]);
        assert_eq!(from_rows("7|x", 8).expect_err("short").code, "slurm_format");
    }

    #[test]
    fn a_table_is_read_or_its_line_named() {
        let read = parse_csv("# a lab\nhours, preempted, ended\n0.5,1,100\n2,0,\n").unwrap();
        assert_eq!(read[0], Lifetime { seconds: 1800.0, preempted: true, ended_s: Some(100) });
        assert_eq!(read[1], Lifetime { seconds: 7200.0, preempted: false, ended_s: None });
        for (text, place) in [
            ("", "line 1"),
            ("a,b\n", "line 1"),
            ("seconds\n1\n", "line 1"),
            ("seconds,preempted\n1,1\nx,1\n", "line 3"),
            ("seconds,preempted\n-1,1\n", "line 2"),
            ("seconds,preempted\n1,maybe\n", "line 2"),
        ] {
            let error = parse_csv(text).expect_err(text);
            assert_eq!((error.code, error.place.as_str()), ("bad_table", place), "{text}");
        }
    }
}
