//! `verify kernels`: every kernel of the trunk and of the optimizer against its definition in f64, on this machine's GPU.
//!
//! Launches go through the launchers that training uses, so their grids and arguments are proven too. Each family of ops has
//! a file: references, which are pure and tested against `crate::ops`, and the cases that are tried.

mod attention;
mod islands;
mod norms;
mod optimizer;
mod pointwise;
mod products;
mod rig;
mod timing;

use super::device::Gpu;
use crate::{Error, Result};
use rig::{Check, Rig, Verdict};
use serde::Serialize;
use std::time::Instant;
use timing::Timing;

/// Bytes for the tensors of one comparison.
const MEMORY: usize = 256 << 20;

/// One op on one shape.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Case {
    op: &'static str,
    operands: &'static str,
    shape: String,
    outputs: Vec<Check>,
    /// Whether two launches gave the same bits.
    repeats: bool,
    /// Why it failed; empty if it did not.
    failure: String,
    passed: bool,
}

impl Case {
    fn new(op: &'static str, operands: &'static str, shape: String, verdict: Result<Verdict>) -> Self {
        let (outputs, repeats, failure) = match verdict {
            Err(error) => (Vec::new(), false, error.to_string()),
            Ok(Verdict { checks, repeats }) => {
                let mut failures: Vec<String> = checks.iter().filter_map(failure).collect();
                if !repeats {
                    failures.push("two launches differ".into());
                }
                (checks, repeats, failures.join(", "))
            }
        };
        Self { op, operands, shape, outputs, repeats, passed: failure.is_empty(), failure }
    }

    /// The output nearest to its limit, or furthest over it.
    fn worst(&self) -> Option<&Check> {
        self.outputs.iter().max_by(|a, b| share(a).total_cmp(&share(b)))
    }
}

/// Error in units of the limit.
fn share(check: &Check) -> f64 {
    if check.error == 0.0 { 0.0 } else { check.error / check.limit }
}

fn failure(check: &Check) -> Option<String> {
    let Check { output, error, limit, stray } = check;
    match (check.passed(), stray) {
        (true, _) => None,
        (false, true) => Some(format!("memory outside of {output} was written")),
        (false, false) => Some(format!("{output} off by {error:.1e}, limit {limit:.0e}")),
    }
}

/// What was tried, in order.
#[derive(Debug)]
struct Table {
    seed: u64,
    cases: Vec<Case>,
    timings: Vec<Timing>,
    /// Why nothing more could be launched.
    stopped: Option<String>,
}

impl Table {
    /// Tries one op on one shape, unless the device is lost.
    fn case(
        &mut self,
        rig: &mut Rig<'_>,
        op: &'static str,
        shape: String,
        work: impl FnOnce(&mut Rig<'_>) -> Result<Verdict>,
    ) {
        if self.stopped.is_some() {
            return;
        }
        let operands = if rig.half() { "bf16" } else { "f32" };
        let begun = rig.begin(self.seed, &format!("verify kernels {op} {operands} {shape}"));
        let verdict = begun.and_then(|()| work(rig));
        self.look(rig, op, verdict.as_ref().err());
        self.cases.push(Case::new(op, operands, shape, verdict));
    }

    /// After an error, whether the device still answers: a bad access ends everything on it.
    fn look(&mut self, rig: &Rig<'_>, op: &str, error: Option<&Error>) {
        if error.is_some() && rig.gpu.synchronize().is_err() {
            self.stopped =
                Some(format!("the device is lost to this process after {op}: what would follow was not tried"));
        }
    }
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct KernelReport {
    device: String,
    /// Of all random inputs.
    seed: u64,
    seconds: f64,
    cases: Vec<Case>,
    timings: Vec<Timing>,
    stopped: Option<String>,
    pub passed: bool,
}

/// Compares every kernel with its reference, on inputs drawn from `seed`, and times them if asked to.
///
/// # Errors
/// If there is no GPU or no memory on it. An op that fails is no error: the report says so.
pub(crate) fn kernels(seed: u64, with_timing: bool, tell: &mut dyn FnMut(&str)) -> Result<KernelReport> {
    tell("opening the GPU");
    let gpu = Gpu::open(0)?;
    let started = Instant::now();
    let mut table = Table { seed, cases: Vec::new(), timings: Vec::new(), stopped: None };
    for half in [false, true] {
        tell(if half { "comparing bf16" } else { "comparing f32" });
        let mut rig = match Rig::new(&gpu, half, MEMORY) {
            Ok(rig) => rig,
            // The device was lost before: the table says where.
            Err(_) if table.stopped.is_some() => break,
            Err(error) => return Err(error),
        };
        if !half {
            islands::all(&mut rig, &mut table);
        }
        pointwise::all(&mut rig, &mut table);
        norms::all(&mut rig, &mut table);
        products::all(&mut rig, &mut table);
        attention::all(&mut rig, &mut table);
        optimizer::all(&mut rig, &mut table);
    }
    let seconds = started.elapsed().as_secs_f64();
    if with_timing && table.stopped.is_none() {
        tell("timing");
        timing::all(&gpu, &mut table)?;
    }
    let Table { cases, timings, stopped, .. } = table;
    let passed = stopped.is_none()
        && cases.iter().all(|case| case.passed)
        && timings.iter().all(|timing| timing.failure.is_empty());
    Ok(KernelReport { device: gpu.name.clone(), seed, seconds, cases, timings, stopped, passed })
}

impl KernelReport {
    /// Ops that failed, each once.
    pub fn failures(&self) -> Vec<String> {
        let cases = self.cases.iter().filter(|case| !case.passed).map(|case| format!("{} {}", case.op, case.operands));
        let timings = self.timings.iter().filter(|timing| !timing.failure.is_empty());
        let mut names: Vec<String> = cases.chain(timings.map(|timing| format!("timing of {}", timing.op))).collect();
        names.dedup();
        names
    }

    /// A line an op and operand format, with the shape and output nearest to the limit; failed cases line by line.
    pub fn to_text(&self) -> String {
        let mut text =
            format!("{}, seed {}: {} cases, {:.1} s\n", self.device, self.seed, self.cases.len(), self.seconds);
        text += "  op                           operands  cases     error     limit  worst at\n";
        let mut done: Vec<(&str, &str)> = Vec::new();
        for case in &self.cases {
            let key = (case.op, case.operands);
            if done.contains(&key) {
                continue;
            }
            done.push(key);
            let group: Vec<&Case> = self.cases.iter().filter(|case| (case.op, case.operands) == key).collect();
            text += &line(&group);
            for failed in group.iter().filter(|case| !case.passed) {
                text += &format!("      FAILED  {}: {}\n", failed.shape, failed.failure);
            }
        }
        if !self.timings.is_empty() {
            text += "\n  op                                              ms             rate  % of floor\n";
            text.extend(self.timings.iter().map(Timing::to_line));
        }
        if let Some(stopped) = &self.stopped {
            text += &format!("  {stopped}\n");
        }
        let failed = self.cases.iter().filter(|case| !case.passed).count();
        text + &match failed {
            0 if self.passed => "  all within their limits, and the same bits twice".to_owned(),
            _ => format!("  {failed} of {} cases failed; --seed {} repeats them", self.cases.len(), self.seed),
        }
    }
}

/// The cases of one op.
fn line(group: &[&Case]) -> String {
    let worst = group.iter().filter_map(|case| Some((*case, case.worst()?)));
    let Some((case, check)) = worst.max_by(|a, b| share(a.1).total_cmp(&share(b.1))) else {
        let (op, operands) = group.first().map_or(("", ""), |case| (case.op, case.operands));
        return format!("  {op:<28} {operands:<8} {:>6}\n", group.len());
    };
    format!(
        "  {:<28} {:<8} {:>6} {:>9.1e} {:>9.0e}  {} of {}\n",
        case.op,
        case.operands,
        group.len(),
        check.error,
        check.limit,
        check.output,
        case.shape
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(error: f64, stray: bool) -> Check {
        Check { output: "dx", error, limit: 1e-5, stray }
    }

    fn case(shape: &str, checks: Vec<Check>, repeats: bool) -> Case {
        Case::new("gelu", "f32", shape.into(), Ok(Verdict { checks, repeats }))
    }

    #[test]
    fn an_op_fails_by_its_error_its_bits_its_bounds_or_its_launch() {
        assert!(case("8", vec![check(1e-6, false)], true).passed);
        for (failed, why) in [
            (case("8", vec![check(2e-5, false)], true), "dx off by 2.0e-5, limit 1e-5"),
            (case("8", vec![check(f64::INFINITY, false)], true), "dx off by inf, limit 1e-5"),
            (case("8", vec![check(f64::NAN, false)], true), "dx off by NaN, limit 1e-5"),
            (case("8", vec![check(0.0, true)], true), "memory outside of dx was written"),
            (case("8", vec![check(0.0, false)], false), "two launches differ"),
            (Case::new("gelu", "f32", "8".into(), Err(Error::crash("illegal access"))), "illegal access"),
        ] {
            assert!(!failed.passed && failed.failure == why, "{failed:?}");
        }
    }

    #[test]
    fn a_failed_case_is_marked_and_the_table_stays_whole() {
        let good = case("8 elements", vec![check(1e-6, false)], true);
        let bad = case("9 elements", vec![check(1e-3, false), check(1e-7, false)], true);
        let other = Case { op: "product", ..good.clone() };
        let report = KernelReport {
            device: "GPU".into(),
            seed: 7,
            seconds: 1.0,
            cases: vec![good.clone(), bad, other.clone()],
            timings: Vec::new(),
            stopped: None,
            passed: false,
        };
        let text = report.to_text();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("seed 7: 3 cases"), "{text}");
        assert!(
            lines[2].contains("gelu") && lines[2].contains("1.0e-3") && lines[2].ends_with("dx of 9 elements"),
            "{text}"
        );
        assert_eq!(lines[3], "      FAILED  9 elements: dx off by 1.0e-3, limit 1e-5");
        assert!(lines[4].contains("product") && lines[5].contains("1 of 3 cases failed; --seed 7"), "{text}");
        assert_eq!(report.failures(), ["gelu f32"]);
        let report = KernelReport { cases: vec![good, other], passed: true, ..report };
        assert!(
            report.to_text().ends_with("all within their limits, and the same bits twice")
                && report.failures().is_empty()
        );
    }
}
