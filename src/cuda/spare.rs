//! How much of the host's memory this process may still take.

use crate::train::memory::kilobytes;
use std::path::{Path, PathBuf};

/// Bytes that this process may still take without anybody suffering: the machine's, or what its control group (a job of Slurm, a
/// container) is allowed, if that is less. 0 where the system does not tell.
pub(super) fn available() -> u64 {
    let machine = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = group_folders(&groups).into_iter().filter_map(|folder| left_in_group(&folder));
    limits.chain([kilobytes(&machine, "MemAvailable:") * 1024]).min().unwrap_or(0)
}

/// Folders that may limit this process's memory, by what `/proc/self/cgroup` says: its group's and those of the groups around
/// it, of either version of control groups.
fn group_folders(groups: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let top = match controllers {
            "" => root.to_owned(),
            _ if controllers.split(',').any(|controller| controller == "memory") => root.join("memory"),
            _ => continue,
        };
        let group = top.join(path.trim_start_matches('/'));
        folders.extend(group.ancestors().take_while(|folder| folder.starts_with(&top)).map(Path::to_owned));
    }
    folders
}

/// What a group may still take; files that are cached make room. `None`: it has no limit.
fn left_in_group(folder: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let number = |text: String| text.trim().parse::<u64>().ok();
    let limit = read("memory.max").or_else(|| read("memory.limit_in_bytes")).and_then(number)?;
    let used = read("memory.current").or_else(|| read("memory.usage_in_bytes")).and_then(number)?;
    let statistics = read("memory.stat").unwrap_or_default();
    let cached: u64 = statistics
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| ["active_file", "inactive_file"].contains(name))
        .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
        .sum();
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_and_those_around_it_limit() {
        let folders = |text: &str| group_folders(text).iter().map(|f| f.display().to_string()).collect::<Vec<_>>();
        assert_eq!(
            folders("0::/slurm/job_7\n"),
            ["/sys/fs/cgroup/slurm/job_7", "/sys/fs/cgroup/slurm", "/sys/fs/cgroup"]
        );
        assert_eq!(folders("9:cpu,memory:/job\n4:pids:/job\n"), ["/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"]);
        assert!(folders("nonsense").is_empty());
    }

    #[test]
    fn cached_files_make_room_in_a_group() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        write("memory.max", "max\n");
        assert_eq!(left_in_group(folder.path()), None);
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        assert_eq!(left_in_group(folder.path()), Some(300));
        write("memory.stat", "anon 400\ninactive_file 200\nactive_file 50\nfile 250\n");
        assert_eq!(left_in_group(folder.path()), Some(550));
        assert!(available() > 0);
    }
}
