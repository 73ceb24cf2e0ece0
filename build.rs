//! Embeds the code's commit as `LBVA_COMMIT`: runs and checkpoints record the code that made them.
//!
//! `<12 hex digits>`, with `-dirty` if tracked sources differ from the commit, or `unknown` outside a git checkout
//! (a source archive). Reruns when HEAD moves or something that is compiled changes, not on every build.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // `src` and the manifests are what the dirty mark is about: what is compiled into the binary.
    for path in ["src", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]);
    if commit.is_some() {
        watch_head();
    }
    let commit = match commit {
        Some(commit) if is_dirty() => format!("{commit}-dirty"),
        Some(commit) => commit,
        None => "unknown".to_owned(),
    };
    println!("cargo::rustc-env=LBVA_COMMIT={commit}");
}

/// HEAD names the branch, the branch's file the commit; both may lie in another folder for a linked worktree.
/// A path that does not exist would make cargo rerun for ever, so only existing ones are watched.
fn watch_head() {
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    let names = [Some("HEAD".to_owned()), branch, Some("packed-refs".to_owned())];
    for name in names.into_iter().flatten() {
        if let Some(path) = git(&["rev-parse", "--git-path", &name]).filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
}

fn is_dirty() -> bool {
    let status = ["status", "--porcelain", "--untracked-files=no", "--", "src", "build.rs", "Cargo.toml", "Cargo.lock"];
    git(&status).is_some_and(|changes| !changes.is_empty())
}

fn git(arguments: &[&str]) -> Option<String> {
    // The manifest's folder must be the checkout's top: an archive unpacked inside another repository is not that
    // repository's commit.
    let top = Command::new("git").args(["rev-parse", "--show-prefix"]).output().ok()?;
    if !top.status.success() || !String::from_utf8_lossy(&top.stdout).trim().is_empty() {
        return None;
    }
    let output = Command::new("git").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
