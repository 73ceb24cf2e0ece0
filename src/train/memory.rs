//! Memory of this process, for the step events and for what is measured by itself.

use crate::runlog::{Memory, MemoryKind};

/// Resident set now and at its peak, and the machine's memory; zeros where the system does not tell.
pub fn resident() -> Memory {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let machine = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    Memory {
        kind: MemoryKind::Rss,
        bytes: kilobytes(&status, "VmRSS:") * 1024,
        peak_bytes: kilobytes(&status, "VmHWM:") * 1024,
        total_bytes: kilobytes(&machine, "MemTotal:") * 1024,
        parts: None,
    }
}

/// Lets the peak begin anew at what is resident now. `false` where the system does not allow it: peaks are then those
/// since the process began.
pub fn reset_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// A field of /proc that is given in kB; 0 if it is not there.
pub(crate) fn kilobytes(text: &str, field: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(field))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok())
        .unwrap_or(0)
}
