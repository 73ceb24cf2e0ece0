//! The batch script of an arm.
//!
//! Its last line replaces the shell by the program's step. So nothing swallows the exit code, and a SIGTERM reaches the
//! trainer: a shell that stays in between dies of it, and takes the trainer along seconds later, saved or not.

use super::command::quoted;
use crate::config::SlurmSettings;
use std::fmt;
use std::path::PathBuf;

/// Tells the worker how long before the end of its time it asked to be warned, in seconds.
pub const SIGNAL_LEAD_VARIABLE: &str = "LBVA_TUI_SIGNAL_LEAD_S";
/// Where the script itself lies.
pub(super) const BATCH_SCRIPT_VARIABLE: &str = "LBVA_TUI_BATCH_SCRIPT";
/// Attempts of the job that may end in a row without a new checkpoint.
pub(super) const IDLE_ATTEMPTS_VARIABLE: &str = "LBVA_TUI_MAX_IDLE_ATTEMPTS";
/// Slurm may send the warning this much earlier than asked.
const EARLIEST_S: u64 = 60;
/// Where nothing was measured yet.
const UNMEASURED_LEAD_S: u64 = 180;

/// Everything that the script says. `Display` is its text.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchScript {
    pub settings: SlurmSettings,
    pub job_name: String,
    pub comment: String,
    /// The script's own file; the job's output goes beside it.
    pub path: PathBuf,
    /// This program, by its absolute path.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Seconds before the time limit at which the program is warned; half of a limit that is shorter than twice this.
    pub lead_s: u64,
}

/// Two saves and two steps of the slow kind, and what Slurm may be early by.
pub fn signal_lead_s(save_ms: Option<f64>, step_ms: Option<f64>) -> u64 {
    match (save_ms, step_ms) {
        (Some(save_ms), Some(step_ms)) => ((2.0 * save_ms + 2.0 * step_ms) / 1e3).ceil() as u64 + EARLIEST_S,
        _ => UNMEASURED_LEAD_S,
    }
}

/// A time limit as sbatch takes it, in seconds: `30` (minutes), `10:00`, `4:00:00`, `2-0`, `1-12:30`.
fn limit_s(text: &str) -> Option<u64> {
    let (days, clock) = match text.split_once('-') {
        Some((days, clock)) => (Some(days.parse::<u64>().ok()?), clock),
        None => (None, text),
    };
    let parts = clock.split(':').map(|part| part.parse::<u64>().ok()).collect::<Option<Vec<_>>>()?;
    let clock_s = match (days, &parts[..]) {
        (Some(_), [hours]) => hours * 3600,
        (Some(_), [hours, minutes]) => hours * 3600 + minutes * 60,
        (None, [minutes]) => minutes * 60,
        (None, [minutes, seconds]) => minutes * 60 + seconds,
        (_, [hours, minutes, seconds]) => hours * 3600 + minutes * 60 + seconds,
        _ => return None,
    };
    Some(days.unwrap_or(0) * 86_400 + clock_s)
}

impl fmt::Display for BatchScript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lead_s = &self.lead_s.min(self.settings.time.as_deref().and_then(limit_s).unwrap_or(u64::MAX) / 2);
        let Self { settings, job_name, comment, path, program, arguments, .. } = self;
        writeln!(f, "#!/bin/bash")?;
        let mut option = |name: &str, value: &str| writeln!(f, "#SBATCH --{name}={}", quoted(value));
        option("job-name", job_name)?;
        option("comment", comment)?;
        option("dependency", "singleton")?;
        let given = [
            ("partition", settings.partition.clone()),
            ("qos", settings.qos.clone()),
            ("account", settings.account.clone()),
            ("nodes", Some("1".to_owned())),
            ("ntasks", Some("1".to_owned())),
            ("gres", settings.gpus.map(|gpus| format!("gpu:{gpus}"))),
            ("cpus-per-task", settings.cpus.map(|cpus| cpus.to_string())),
            ("mem", settings.mem.clone()),
            ("time", settings.time.clone()),
        ];
        for (name, value) in given {
            if let Some(value) = value {
                option(name, &value)?;
            }
        }
        writeln!(f, "#SBATCH --requeue")?;
        writeln!(f, "#SBATCH --open-mode=append")?;
        writeln!(f, "#SBATCH --signal=USR2@{lead_s}")?;
        writeln!(f, "#SBATCH --output={}", quoted(&path.with_file_name("%j.out").to_string_lossy()))?;
        for line in &settings.extra {
            writeln!(f, "#SBATCH {line}")?;
        }
        writeln!(f, "export {SIGNAL_LEAD_VARIABLE}={lead_s}")?;
        writeln!(f, "export {BATCH_SCRIPT_VARIABLE}={}", quoted(&path.to_string_lossy()))?;
        if let Some(most) = settings.max_idle_attempts {
            writeln!(f, "export {IDLE_ATTEMPTS_VARIABLE}={most}")?;
        }
        for line in &settings.setup {
            writeln!(f, "{line}")?;
        }
        write!(f, "exec ")?;
        match &settings.wrapper {
            Some(wrapper) => write!(f, "{}", quoted(&wrapper.to_string_lossy()))?,
            None => {
                write!(f, "srun --nodes=1 --ntasks=1")?;
                if let Some(cpus) = settings.cpus {
                    write!(f, " --cpus-per-task={cpus}")?;
                }
                write!(f, " --kill-on-bad-exit=1")?;
            }
        }
        write!(f, " {}", quoted(&program.to_string_lossy()))?;
        arguments.iter().try_for_each(|argument| write!(f, " {}", quoted(argument)))?;
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(settings: SlurmSettings) -> String {
        let arguments = ["--no-ui", "run", "/e/a b", "--arm", "m1"].map(str::to_owned).to_vec();
        BatchScript {
            settings,
            job_name: "lbva-demo-m1-3fa09c".to_owned(),
            comment: "lbva:/e/a b/runs/m1".to_owned(),
            path: PathBuf::from("/e/a b/runs/m1/slurm/job-0001.sh"),
            program: PathBuf::from("/opt/lbva-tui"),
            arguments,
            lead_s: 180,
        }
        .to_string()
    }

    #[test]
    fn the_script_asks_for_what_is_given_and_ends_in_the_program() {
        let settings = SlurmSettings {
            partition: Some("extra".to_owned()),
            gpus: Some(8),
            cpus: Some(32),
            time: Some("4:00:00".to_owned()),
            extra: vec!["--exclude=gpu3".to_owned()],
            setup: vec!["module load cuda".to_owned()],
            max_idle_attempts: Some(5),
            ..SlurmSettings::default()
        };
        let wanted = "\
#!/bin/bash
#SBATCH --job-name=lbva-demo-m1-3fa09c
#SBATCH --comment='lbva:/e/a b/runs/m1'
#SBATCH --dependency=singleton
#SBATCH --partition=extra
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=32
#SBATCH --time=4:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@180
#SBATCH --output='/e/a b/runs/m1/slurm/%j.out'
#SBATCH --exclude=gpu3
export LBVA_TUI_SIGNAL_LEAD_S=180
export LBVA_TUI_BATCH_SCRIPT='/e/a b/runs/m1/slurm/job-0001.sh'
export LBVA_TUI_MAX_IDLE_ATTEMPTS=5
module load cuda
exec srun --nodes=1 --ntasks=1 --cpus-per-task=32 --kill-on-bad-exit=1 /opt/lbva-tui --no-ui run '/e/a b' --arm m1
";
        assert_eq!(script(settings), wanted);
        let wrapped =
            script(SlurmSettings { wrapper: Some(PathBuf::from("/s/template.sh")), ..SlurmSettings::default() });
        assert!(wrapped.ends_with("\nexec /s/template.sh /opt/lbva-tui --no-ui run '/e/a b' --arm m1\n"), "{wrapped}");
    }

    #[test]
    fn a_warning_never_comes_before_half_of_the_time() {
        let limits = ["30", "10:00", "4:00:00", "2-0", "1-12:30", "UNLIMITED", ""].map(limit_s);
        assert_eq!(limits, [Some(1800), Some(600), Some(14_400), Some(172_800), Some(131_400), None, None]);
        let short = script(SlurmSettings { time: Some("2".to_owned()), ..SlurmSettings::default() });
        assert!(short.contains("--signal=USR2@60\n"), "{short}");
    }

    #[test]
    fn the_warning_leaves_time_for_two_saves() {
        assert_eq!(signal_lead_s(Some(155_000.0), Some(4_100.0)), 379);
        assert_eq!(signal_lead_s(None, Some(4_100.0)), UNMEASURED_LEAD_S);
    }
}
