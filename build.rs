//! Embeds the code's commit as `LBVA_COMMIT`: runs and checkpoints record the code that made them. With the `cuda` feature
//! compiles `kernels/*.cu` to machine code, which is embedded too.
//!
//! The commit is `<12 hex digits>`, with `-dirty` if tracked sources differ from the commit, or `unknown` outside a git checkout
//! (a source archive). Reruns when HEAD moves or something that is compiled changes, not on every build.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

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
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some()
        && let Err(problem) = compile_kernels()
    {
        println!("cargo::error={problem}");
    }
}

/// Ampere's machine code, Hopper's with its own instructions, and PTX that the driver compiles for whatever comes later.
const ARCHITECTURES: [&str; 2] = ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a"];

/// Compiles `kernels/*.cu` and writes `kernels.rs`, the table that `src/cuda/kernels.rs` includes.
fn compile_kernels() -> Result<(), String> {
    for name in ["NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=kernels");
    let nvcc = find_nvcc().ok_or(
        "the cuda feature needs nvcc, and neither $NVCC, $CUDA_HOME/bin nor PATH has it; \
         `scripts/setup-cuda.sh .cuda && . .cuda/env.sh` installs it into .cuda",
    )?;
    let out = PathBuf::from(std::env::var("OUT_DIR").map_err(|error| error.to_string())?);
    let folder = std::fs::read_dir("kernels").map_err(|error| format!("cannot read kernels/: {error}"))?;
    let mut sources: Vec<PathBuf> = folder
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    let compilations = sources.iter().map(|source| compile(&nvcc, &out, source)).collect::<Result<Vec<_>, _>>()?;
    // Candle takes kernels of others as PTX alone.
    let mut table = String::new();
    for name in ["norm_modulate", "weighted_mse"] {
        let ptx = out.join(format!("{name}.ptx"));
        let source = format!("kernels/{name}.cu");
        let compiled = Command::new(&nvcc)
            .args(["--ptx", "-O3", "-std=c++17", "-arch=compute_80", &source, "-o"])
            .arg(&ptx)
            .status()
            .map_err(|error| format!("cannot run {}: {error}", nvcc.display()))?;
        if !compiled.success() {
            return Err(format!("nvcc could not compile {source} to PTX; its words are above"));
        }
        table += &format!("pub(crate) const {}_PTX: &str = include_str!({ptx:?});\n", name.to_uppercase());
    }
    table += "pub(super) const IMAGES: &[(&str, &[u8])] = &[\n";
    for (mut child, name, image) in compilations {
        let status = child.wait().map_err(|error| format!("nvcc: {error}"))?;
        if !status.success() {
            return Err(format!("nvcc could not compile kernels/{name}.cu ({status}); its words are above"));
        }
        table += &format!("    ({name:?}, include_bytes!({image:?})),\n");
    }
    table += "];\n";
    std::fs::write(out.join("kernels.rs"), table).map_err(|error| format!("cannot write kernels.rs: {error}"))
}

/// Starts the compiler: all files at once, since the largest alone decides how long it takes.
fn compile(nvcc: &Path, out: &Path, source: &Path) -> Result<(Child, String, PathBuf), String> {
    let name = source.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let image = out.join(format!("{name}.fatbin"));
    let child = Command::new(nvcc)
        .args(["--fatbin", "-O3", "-std=c++17"])
        .args(ARCHITECTURES.iter().flat_map(|architecture| ["-gencode", architecture]))
        .arg("-o")
        .arg(&image)
        .arg(source)
        .spawn()
        .map_err(|error| format!("cannot run {}: {error}", nvcc.display()))?;
    Ok((child, name, image))
}

fn find_nvcc() -> Option<PathBuf> {
    let named = std::env::var_os("NVCC").map(PathBuf::from);
    let home = std::env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut candidates = named.into_iter().chain(home).chain(std::env::split_paths(&path).map(|dir| dir.join("nvcc")));
    candidates.find(|candidate| candidate.is_file())
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
