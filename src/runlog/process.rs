//! Which process is meant, and whether it still lives: a pid alone may belong to somebody else by now.

use super::view::Liveness;
use serde::{Deserialize, Serialize};

/// A process, told apart from every later one with the same number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub pid: u32,
    pub host: String,
    /// Clock ticks after boot at which it started: field 22 of /proc/PID/stat. Absent where there is no /proc.
    #[serde(default)]
    pub start_ticks: Option<u64>,
    /// Tells boots of one host apart, since ticks count from boot.
    #[serde(default)]
    pub boot_id: Option<String>,
    /// In another pid namespace (a container) the number means another process, whatever the host's name.
    #[serde(default)]
    pub pid_namespace: Option<String>,
}

impl ProcessIdentity {
    /// This process.
    pub fn current() -> Self {
        let pid = std::process::id();
        Self {
            pid,
            host: host_name(),
            start_ticks: stat_of(pid).map(|stat| stat.start_ticks),
            boot_id: boot_id(),
            pid_namespace: pid_namespace(),
        }
    }

    /// Can this machine see the process table it is in.
    pub fn is_local(&self) -> bool {
        self.host == host_name() && same_or_unknown(&self.pid_namespace, &pid_namespace())
    }

    /// Evidence of life. A zombie is dead; a pid that another process has by now is dead; another host is unknown.
    pub fn liveness(&self) -> Liveness {
        if !self.is_local() {
            return Liveness::Unknown;
        }
        if !same_or_unknown(&self.boot_id, &boot_id()) {
            return Liveness::Dead;
        }
        if has_proc() {
            return match stat_of(self.pid) {
                Some(stat) if stat.is_dead() => Liveness::Dead,
                Some(stat) if self.start_ticks.is_none_or(|ticks| ticks == stat.start_ticks) => Liveness::Alive,
                _ => Liveness::Dead,
            };
        }
        let pid = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw);
        match pid.map(rustix::process::test_kill_process) {
            Some(Ok(()) | Err(rustix::io::Errno::PERM)) => Liveness::Alive,
            _ => Liveness::Dead,
        }
    }
}

fn same_or_unknown(recorded: &Option<String>, here: &Option<String>) -> bool {
    match (recorded, here) {
        (Some(recorded), Some(here)) => recorded == here,
        _ => true,
    }
}

struct ProcessStat {
    state: u8,
    start_ticks: u64,
}

impl ProcessStat {
    /// Zombie or being removed.
    fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

fn has_proc() -> bool {
    std::path::Path::new("/proc/self/stat").exists()
}

/// `None` if there is no such process, or no /proc. proc_pid_stat(5): the name in parentheses may hold anything,
/// so fields count from the last `)`; the state is field 3 and the start time field 22.
fn stat_of(pid: u32) -> Option<ProcessStat> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let after_name = text.get(text.iter().rposition(|&byte| byte == b')')? + 1..)?;
    let rest = String::from_utf8_lossy(after_name);
    let mut fields = rest.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let start_ticks = fields.nth(18)?.parse().ok()?;
    Some(ProcessStat { state, start_ticks })
}

fn boot_id() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|text| text.trim().to_owned())
}

fn pid_namespace() -> Option<String> {
    std::fs::read_link("/proc/self/ns/pid").ok().map(|link| link.to_string_lossy().into_owned())
}

/// This machine's name; `unknown` if the system does not tell.
pub fn host_name() -> String {
    let from_kernel = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let from_command = || {
        let output = std::process::Command::new("hostname").output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    let name = from_kernel().or_else(from_command).map(|name| name.trim().to_owned());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}
