//! A disk that is small, full or read-only, for tests of what that costs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small file system of its own, unmounted at the end.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None`, loudly, where this user may not mount.
    pub fn mount(at: &Path, options: &str) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(at).output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self(at.to_owned()));
        }
        eprintln!("SKIPPED: this user cannot mount a tmpfs, so a full-disk test did not run here");
        None
    }

    /// Changes its mount options, size included.
    pub fn remount(&self, options: &str) {
        assert!(
            Command::new("mount").args(["-o", &format!("remount,{options}")]).arg(&self.0).status().unwrap().success()
        );
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
