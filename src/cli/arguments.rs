//! The commands, their arguments and the help that teaches them.

use crate::train::packing_check;
use crate::weights::WeightDtype;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Train and watch video-action world models, two arms side by side.
#[derive(Debug, Parser)]
#[command(
    name = "lbva-tui",
    bin_name = "lbva-tui",
    version = concat!(env!("CARGO_PKG_VERSION"), " (", env!("LBVA_COMMIT"), ")"),
    about = "Train and watch video-action world models, two arms side by side",
    long_about = "Train and watch video-action world models, two arms side by side.\n\n\
        An experiment is a folder with an experiment.yaml: a base recipe, arms that differ in declared fields, and one \
        decision rule. Each arm trains in a process of its own; this program starts and stops them, and draws what \
        their run directories say. Leaving the console leaves the runs running.",
    after_help = EXIT_CODES,
    max_term_width = 100
)]
pub struct Arguments {
    #[command(flatten)]
    pub global: Global,
    /// Folder of experiments, or one experiment, to open in the console [default: experiments]
    pub path: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Option<Command>,
}

const EXIT_CODES: &str = "\
Examples:
  lbva-tui demo                       train both arms of the shipped demo and watch them
  lbva-tui                            open the console over experiments/
  lbva-tui check experiments/demo     decide in seconds what a CPU can decide
  lbva-tui run experiments/demo --no-ui --set train.lr=1e-4

Exit codes:
   0  all steps done
   2  the command line is wrong
  65  a dataset, clip or input file is absent or broken
  69  a device or the network cannot be used
  70  the program failed
  74  a file could not be written: disk full, quota, permissions
  75  stopped early with a durable checkpoint: resume it; from the console: a signal ended it, and
      the runs go on
  78  configuration or identity refused: retrying will not help";

/// Options of every command.
#[derive(Clone, Debug, Default, Args)]
pub struct Global {
    /// Print lines instead of drawing a console (implied without a terminal)
    #[arg(long, global = true)]
    pub no_ui: bool,
    /// Print JSON on stdout and nothing else there: one document, or a line an event while running
    #[arg(long, global = true)]
    pub json: bool,
    /// Look only: no start, stop, resume or kill
    #[arg(long, global = true)]
    pub read_only: bool,
    #[command(flatten)]
    pub look: Look,
}

/// How the console looks.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Look {
    /// Colours for a light background
    #[arg(long, global = true, help_heading = "Console", conflicts_with = "dark")]
    pub light: bool,
    /// Colours for a dark background
    #[arg(long, global = true, help_heading = "Console")]
    pub dark: bool,
    /// Plain ASCII instead of line-drawing and braille characters
    #[arg(long, global = true, help_heading = "Console")]
    pub ascii: bool,
    /// When to use colours (NO_COLOR is honoured by auto)
    #[arg(long, global = true, help_heading = "Console", value_enum, default_value_t, value_name = "WHEN")]
    pub color: ColorWhen,
}

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ColorWhen {
    #[default]
    Auto,
    Always,
    Never,
}

/// One command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train the shipped demo: both arms, on a CPU, in minutes
    #[command(after_help = DEMO_EXAMPLES)]
    Demo(DemoArguments),
    /// Train the arms of an experiment
    #[command(after_help = RUN_EXAMPLES)]
    Run(RunArguments),
    /// Continue arms from their last complete checkpoint
    #[command(after_help = RESUME_EXAMPLES)]
    Resume(ResumeArguments),
    /// Hand arms to Slurm, each as a job of its own
    #[command(after_help = SUBMIT_EXAMPLES)]
    Submit(SubmitArguments),
    /// How often to save, how many tries and hours it takes, from attempts that were seen
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanArguments),
    /// Stop arms, after a checkpoint
    #[command(after_help = STOP_EXAMPLES)]
    Stop(StopArguments),
    /// Decide in seconds everything that a CPU can decide
    #[command(after_help = CHECK_EXAMPLES)]
    Check(CheckArguments),
    /// Prove the engine against reference numbers, and packed episodes against single ones
    #[command(after_help = VERIFY_EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
    Verify(VerifyArguments),
    /// Where the time and the memory of a training step go
    #[command(after_help = PROFILE_EXAMPLES)]
    Profile(ProfileArguments),
    /// Time the engine on a GPU
    #[command(after_help = BENCH_EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
    Bench(BenchArguments),
    /// PSNR, SSIM and LPIPS of two pictures, or of two folders picture by picture
    #[command(after_help = METRICS_EXAMPLES)]
    Metrics(MetricsArguments),
    /// Look at a dataset, fit its latent codec
    #[command(after_help = DATA_EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
    Data(DataArguments),
    /// Look at weight files, export a checkpoint in the published layout
    #[command(after_help = WEIGHTS_EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
    Weights(WeightsArguments),
    /// Have the driver compile some of candle's kernels for a GPU; the program runs this by itself
    #[command(hide = true)]
    CompileKernels {
        /// A file of kernels
        name: String,
        /// The GPU's number
        gpu: usize,
    },
    /// Both arms' trajectories over all validation points, and the verdict
    #[command(after_help = REPORT_EXAMPLES)]
    Report(ReportArguments),
}

const DEMO_EXAMPLES: &str = "\
Examples:
  lbva-tui demo
  lbva-tui demo --no-ui --fresh --steps 20
  lbva-tui demo --fresh --set train.seed=7

The same as `lbva-tui run experiments/demo`, from anywhere inside the repository.";

const RUN_EXAMPLES: &str = "\
Examples:
  lbva-tui run experiments/demo
  lbva-tui run experiments/demo --arm m1_baseline --fresh --steps 100
  lbva-tui run experiments/demo --set train.lr=1e-4 --set data.validation_episodes=[3,7]

A run goes on where it stopped, and is refused (exit 78) under another configuration; --fresh moves
it aside and begins anew, --accept-change FIELD goes on with the difference. Overrides apply to every
arm, on top of the recipe and the arm's own. A value is YAML; a relative path in it resolves against
the current folder.";

const RESUME_EXAMPLES: &str = "\
Examples:
  lbva-tui resume experiments/demo --arm m2_geometry

Refused (exit 78) if configuration, data, codec, initial weights or the program's commit differ from
those that the run was started with, each named with both values; --accept-change FIELD goes on all
the same.";

const SUBMIT_EXAMPLES: &str = "\
Examples:
  lbva-tui submit experiments/demo --dry-run
  lbva-tui submit experiments/demo --arm m1_baseline
  lbva-tui submit experiments/demo --set train.steps=8000

What is asked for stands under `slurm:` in experiment.yaml. A preempted job comes back by itself and
goes on from its last checkpoint; a run that was stopped or failed is submitted again, with the
overrides that it was started with. Refused while a job or a worker of the run is alive.";

const PLAN_EXAMPLES: &str = "\
Examples:
  lbva-tui plan experiments/demo
  lbva-tui plan experiments/demo --partition extra --days 14 --min-gpus 8
  lbva-tui plan experiments/demo --csv attempts.csv --step-seconds 4.1 --blocked-seconds 155 --startup-seconds 300

Attempts come from sacct (one heavy call) or from a table with the columns seconds (or hours) and
preempted (1 or 0). What the run has measured need not be given: the time of a step, of a save, and
to the first step.";

const STOP_EXAMPLES: &str = "\
Examples:
  lbva-tui stop experiments/demo --arm m1_baseline
  lbva-tui stop experiments/demo --arm m1_baseline --kill

A stopped arm writes a checkpoint at its next step, exits with 75 and can be resumed. A killed one
loses what it did since its last checkpoint.";

const CHECK_EXAMPLES: &str = "\
Examples:
  lbva-tui check experiments/demo
  lbva-tui check configs/xwam_5b.yaml
  lbva-tui check experiments/demo --set train.lr=1e-4 --json
  lbva-tui check configs/xwam_5b.yaml --hub robbyant/lingbot-va-base

Lists every problem, not only the first; exit 0 without any, else the code of the first.";

const VERIFY_EXAMPLES: &str = "\
Examples:
  lbva-tui verify golden xwam_public.safetensors
  lbva-tui verify packing configs/lingbot_tiny.yaml
  lbva-tui verify noop experiments/demo
  lbva-tui verify kernels --timing";

const PACKING_EXAMPLES: &str = "\
Example:
  lbva-tui verify packing configs/lingbot_tiny.yaml --frames 19,33

Three ways to share a sequence (of one length; padded as `bucket` does; as `budget` does), each
against its episodes one by one: outputs, losses, every gradient, time and memory. Weights and
episodes are drawn from the recipe's seed; of the dataset only the size of its views is read, and
with --tile not even that. Exit 70 if a difference is above its limit, 69 if memory would not do.";

const NOOP_EXAMPLES: &str = "\
Example:
  lbva-tui verify noop experiments/demo

On the first training batches, in the recipe's own number formats and with its own recomputation: the same
pass twice is equal to the last digit; the branch with its initial weights changes no head at all; with
weights as if trained it changes every head, and so do another clip's tokens. Exit 70 if not.";

const PROFILE_EXAMPLES: &str = "\
Example:
  lbva-tui profile experiments/demo --arm m1_baseline --micro-steps 20

Trains from the initial weights on the arm's own data and keeps nothing of it: no run is touched,
latents that are missing are put into the experiment's cache, an absent codec is fitted. A run
tells the same of its first 20 micro-steps in its log with LINGBOT_PROFILE=20 in the environment.";

const METRICS_EXAMPLES: &str = "\
Examples:
  lbva-tui metrics truth.png prediction.png
  lbva-tui metrics truth/ predictions/ --json

Pictures of one size, 8 bits a channel; folders are matched by file name.";

const DATA_EXAMPLES: &str = "\
Examples:
  lbva-tui data info experiments/demo
  lbva-tui data fit-codec experiments/demo";

const WEIGHTS_EXAMPLES: &str = "\
Examples:
  lbva-tui weights inspect models/lingbot-va-base
  lbva-tui weights export experiments/NAME/runs/ARM exported/ --dtype f32

Weights are one safetensors file, or shards with their index, in a folder or in its transformer/.
inspect reads headers only, and ends with 78 if they are not whole weights of a model that
`weights.init` can start from.";

const PACK_EXAMPLES: &str = "\
Examples:
  lbva-tui data pack experiments/packing
  lbva-tui data pack recipe.yaml --set packing.ranks=64 --set train.accumulate=2 --json

One epoch is planned as it would be trained, from metadata alone; costs are FLOP by the model's
sizes. LINGBOT_PAD_MULTIPLE wins over the file, and --set over both.";

const VALIDATE_EXAMPLES: &str = "\
Examples:
  lbva-tui data validate experiments/demo
  lbva-tui data validate recipe.yaml --out verdicts/ --max-reject-share 0.01 --json

Every view and every frame that training uses is decoded. Verdicts are kept by the contents of the
files: a second pass, or one after Ctrl-C, checks what changed. Exit 0; 65 if more is rejected than
allowed, or the dataset contradicts itself.";

const TOKENS_EXAMPLES: &str = "\
Examples:
  lbva-tui data tokens data/droid
  lbva-tui data tokens data/droid --repeat data/droid_again
  lbva-tui data tokens data/droid --replaced observation.images.exterior_1_left=data/droid_other

Caches are compared on the episodes and frames that both have: one may hold more. Exit 65 if tokens
are damaged or not finite, differ when encoded again, or do not depend on the other views.";

const REPORT_EXAMPLES: &str = "\
Examples:
  lbva-tui report experiments/demo
  lbva-tui report experiments/demo --json
  lbva-tui report experiments/demo --equal-work

There is no verdict (undecided) if, by the records of the runs, they differ in more or less than the
ablated fields, or were not equal at step 0 where they must be.";

#[derive(Clone, Debug, Default, Args)]
pub struct Overrides {
    /// Train for this many optimizer steps (short for --set train.steps=N)
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Override a field of the recipe, as in train.lr=1e-4; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

impl Overrides {
    /// As `key=value` texts, in an order in which the shorthand wins.
    pub fn texts(&self) -> Vec<String> {
        self.set.iter().cloned().chain(self.steps.map(|steps| format!("train.steps={steps}"))).collect()
    }

    /// As arguments of `run`, for a worker.
    pub fn arguments(&self) -> Vec<String> {
        let set = self.set.iter().flat_map(|text| ["--set".to_owned(), text.clone()]);
        set.chain(self.steps.into_iter().flat_map(|steps| ["--steps".to_owned(), steps.to_string()])).collect()
    }
}

/// What an attempt may do differently from its run's record.
#[derive(Clone, Debug, Default, Args)]
pub struct Acceptance {
    /// Go on although this field differs from the run's record, as the refusal names it; may be repeated. The change is
    /// logged, shown as a seam, and the earlier record is kept
    #[arg(long, value_name = "FIELD")]
    pub accept_change: Vec<String>,
}

#[derive(Debug, Args)]
pub struct DemoArguments {
    /// Only this arm; may be repeated [default: all]
    #[arg(long, value_name = "ARM")]
    pub arm: Vec<String>,
    /// Begin anew: move the present runs of these arms aside (to runs/.old/) instead of continuing them
    #[arg(long)]
    pub fresh: bool,
    /// Stop with a checkpoint after step N, as a preemption would (exit 75); resume goes on from there
    #[arg(long, value_name = "N")]
    pub stop_after: Option<u64>,
    #[command(flatten)]
    pub overrides: Overrides,
}

#[derive(Debug, Args)]
pub struct RunArguments {
    /// Folder with an experiment.yaml
    pub experiment: PathBuf,
    /// Only this arm; may be repeated [default: all]
    #[arg(long, value_name = "ARM")]
    pub arm: Vec<String>,
    /// Begin anew: move the present runs of these arms aside (to runs/.old/) instead of continuing them
    #[arg(long)]
    pub fresh: bool,
    /// Stop with a checkpoint after step N, as a preemption would (exit 75); resume goes on from there
    #[arg(long, value_name = "N")]
    pub stop_after: Option<u64>,
    #[command(flatten)]
    pub acceptance: Acceptance,
    #[command(flatten)]
    pub overrides: Overrides,
}

#[derive(Debug, Args)]
pub struct ResumeArguments {
    /// Folder with an experiment.yaml
    pub experiment: PathBuf,
    /// The arm to continue; may be repeated
    #[arg(long, value_name = "ARM", required = true)]
    pub arm: Vec<String>,
    #[command(flatten)]
    pub acceptance: Acceptance,
}

#[derive(Debug, Args)]
pub struct SubmitArguments {
    /// Folder with an experiment.yaml that has a `slurm:` block
    pub experiment: PathBuf,
    /// Only this arm; may be repeated [default: all]
    #[arg(long, value_name = "ARM")]
    pub arm: Vec<String>,
    /// Show the batch scripts and submit nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub acceptance: Acceptance,
    #[command(flatten)]
    pub overrides: Overrides,
}

#[derive(Debug, Args)]
pub struct PlanArguments {
    /// Folder with an experiment.yaml
    pub experiment: PathBuf,
    /// The arm to plan [default: the baseline]
    #[arg(long, value_name = "ARM")]
    pub arm: Option<String>,
    /// Learn from this partition's attempts [default: that of the slurm: block]
    #[arg(long, value_name = "NAME", conflicts_with = "csv")]
    pub partition: Option<String>,
    /// Learn from a table instead
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Only attempts with so many GPUs or more [default: those of the slurm: block]
    #[arg(long, value_name = "N")]
    pub min_gpus: Option<u64>,
    /// How far back to look
    #[arg(long, value_name = "N", default_value_t = super::plan::DAYS)]
    pub days: u32,
    /// Steps to be done [default: train.steps]
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Time of a step without saves [default: as measured]
    #[arg(long, value_name = "S")]
    pub step_seconds: Option<f64>,
    /// How long a save holds training up [default: as measured]
    #[arg(long, value_name = "S")]
    pub blocked_seconds: Option<f64>,
    /// From the beginning of a save until it is durable [default: as measured, or as long as it holds up]
    #[arg(long, value_name = "S")]
    pub durable_seconds: Option<f64>,
    /// From the start of an attempt to its first step [default: as measured]
    #[arg(long, value_name = "S")]
    pub startup_seconds: Option<f64>,
    /// Wait before each attempt, in the queue and after a requeue [default: 600]
    #[arg(long, value_name = "S")]
    pub wait_seconds: Option<f64>,
    /// Seed of the simulation
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

#[derive(Debug, Args)]
pub struct StopArguments {
    /// Folder with an experiment.yaml
    pub experiment: PathBuf,
    /// The arm to stop; may be repeated [default: every arm that is at work or in the queue]
    #[arg(long, value_name = "ARM")]
    pub arm: Vec<String>,
    /// End it at once, without a checkpoint; the arm must be named if several are at work
    #[arg(long)]
    pub kill: bool,
}

#[derive(Debug, Args)]
pub struct CheckArguments {
    /// Folder with an experiment.yaml, or one recipe file
    pub path: PathBuf,
    /// Ask the hub whether this repository may be downloaded, as owner/name or datasets/owner/name; may be repeated.
    /// Asked in any case are those in whose cache a file of the recipe would lie that is not here
    #[arg(long, value_name = "REPOSITORY")]
    pub hub: Vec<String>,
    /// How long attempts lived, a table as for `plan --csv`: how many reach the first checkpoint
    #[arg(long, value_name = "FILE")]
    pub attempts: Option<PathBuf>,
    /// Override a field of the recipe, as in train.lr=1e-4; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

#[derive(Debug, Args)]
pub struct VerifyArguments {
    #[command(subcommand)]
    pub what: Verify,
}

/// What can be proven.
#[derive(Debug, Subcommand)]
pub enum Verify {
    /// Recompute a golden file: outputs, losses and every gradient, against its stated tolerances
    Golden {
        /// Golden files (safetensors)
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Compute packed episodes and the same ones by themselves: outputs, losses, every gradient
    #[command(after_help = PACKING_EXAMPLES)]
    Packing(PackingArguments),
    /// A GPU's gradients of every parameter against the CPU's, in f32 and in bf16
    #[command(after_help = GRADIENTS_EXAMPLES)]
    Gradients(GradientsArguments),
    /// Each kernel on this machine's GPU against its definition in f64, in f32 and in bf16
    #[command(after_help = KERNELS_EXAMPLES)]
    Kernels(KernelsArguments),
    /// The geometry branch changes nothing before it is trained, and something afterwards, in the training regime
    #[command(after_help = NOOP_EXAMPLES)]
    Noop {
        /// Folder with an experiment.yaml whose arms differ in the branch
        #[arg(value_name = "EXPERIMENT")]
        experiment: PathBuf,
    },
}

const KERNELS_EXAMPLES: &str = "\
Examples:
  lbva-tui verify kernels
  lbva-tui verify kernels --timing
  lbva-tui verify kernels --seed 1234 --json

Inputs are drawn anew each time, and the seed is printed. A result in f32 may be off by 1e-5 (relative
L2), in bf16 by 1e-2; two launches must give the same bits, and nothing beside an output may change.
Exit 70 if an op fails, 69 without a GPU.";

#[derive(Debug, Args)]
pub struct KernelsArguments {
    /// Time each op too, at the sizes of LingBot-VA's 5 B (9 GiB of GPU memory)
    #[arg(long)]
    pub timing: bool,
    /// Seed of the inputs [default: from the clock]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

const GRADIENTS_EXAMPLES: &str = "\
Examples:
  lbva-tui verify gradients configs/lingbot_tiny.yaml
  lbva-tui verify gradients experiments/demo --arm m2_geometry --regime bf16

The oracle is the same model in f64 on the CPU, on random weights and a small random batch. In f32 a
gradient may be off by 1e-4 (relative L2); in bf16 by 1.5 times what the CPU's bf16 path is off.";

#[derive(Debug, Args)]
pub struct GradientsArguments {
    /// An experiment's folder, or a recipe file
    #[arg(value_name = "EXPERIMENT_OR_RECIPE")]
    pub path: PathBuf,
    /// The arm whose recipe it is [default: the baseline]
    #[arg(long)]
    pub arm: Option<String>,
    /// f32 or bf16 [default: both]
    #[arg(long, value_parser = ["f32", "bf16"])]
    pub regime: Option<String>,
    /// Gradients shown, the worst first
    #[arg(long, default_value_t = 12)]
    pub show: usize,
    /// Override a field of the recipe, as in model.num_layers=2; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

const BENCH_EXAMPLES: &str = "\
Examples:
  lbva-tui bench trunk --frames 280 --batch 4 --chunk 2 --window 34
  lbva-tui bench trunk --frames 128 --optimizer --draws 4:64,1:8 --json

Weights are drawn on the GPU, none are needed. bench/against_torch.sh runs this and a PyTorch peer
in one go.";

#[derive(Debug, Args)]
pub struct BenchArguments {
    #[command(subcommand)]
    pub what: Bench,
}

/// What can be timed.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Forward and backward of LingBot-VA's 5 B on one GPU
    Trunk(TrunkBenchArguments),
    /// Each matrix product of the trunk with each algorithm that cuBLASLt proposes
    Gemm {
        /// Rows of the products
        #[arg(long, default_value_t = 80640)]
        tokens: usize,
    },
}

#[derive(Debug, Args)]
pub struct TrunkBenchArguments {
    /// Latent frames of an episode
    #[arg(long, default_value_t = 280)]
    pub frames: usize,
    /// Episodes packed into the sequence
    #[arg(long, default_value_t = 4)]
    pub batch: usize,
    /// Latent frames of an attention chunk
    #[arg(long, default_value_t = 2)]
    pub chunk: usize,
    /// Reach of attention into the past, in half-chunks
    #[arg(long, default_value_t = 34)]
    pub window: usize,
    /// Other chunks and windows, each met for the first time after the timing
    #[arg(long, value_name = "CHUNK:WINDOW,...", value_delimiter = ',')]
    pub draws: Vec<ChunkWindow>,
    /// Blocks
    #[arg(long, default_value_t = 30)]
    pub layers: usize,
    /// Passes before the timing, the first not counted
    #[arg(long, default_value_t = 1)]
    pub warmup: usize,
    /// Passes timed; the median counts
    #[arg(long, default_value_t = 5)]
    pub repeats: usize,
    /// With masters, moments, and an update after each pass
    #[arg(long)]
    pub optimizer: bool,
    /// Most that a pass may take for what it keeps and works on, GiB [default: what is free]
    #[arg(long, value_name = "GIB")]
    pub arena: Option<u64>,
    /// Most of the host's memory that a pass may keep something in, GiB [default: what the machine has to spare]
    #[arg(long, value_name = "GIB")]
    pub host: Option<u64>,
    /// One more pass, timed kernel by kernel: all launches alike on a line, the longest first
    #[arg(long)]
    pub kernels: bool,
}

/// A chunk and a window, written `4:64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkWindow(pub (usize, usize));

impl std::str::FromStr for ChunkWindow {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once(':').and_then(|(chunk, window)| Some((chunk.parse().ok()?, window.parse().ok()?)));
        parts.filter(|(chunk, _)| *chunk > 0).map(Self).ok_or("chunk and window are needed, as in 4:64")
    }
}

#[derive(Debug, Args)]
pub struct PackingArguments {
    /// An experiment's folder (its baseline), or a recipe file, of the LingBot-VA family
    #[arg(value_name = "EXPERIMENT_OR_RECIPE")]
    pub path: PathBuf,
    /// Latent frames of the episodes
    #[arg(long, value_name = "F,F,...", value_delimiter = ',', default_values_t = packing_check::FRAMES)]
    pub frames: Vec<usize>,
    /// Rows and columns of the tile in latent cells [default: as the dataset says]
    #[arg(long, value_name = "HxW")]
    pub tile: Option<TileSize>,
    /// Override a field of the recipe, as in train.seed=7; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Rows and columns, written `24x20`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileSize(pub (usize, usize));

impl std::str::FromStr for TileSize {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let sides = text.split_once('x').and_then(|(rows, columns)| Some((rows.parse().ok()?, columns.parse().ok()?)));
        sides.map(Self).ok_or("rows and columns are needed, as in 24x20")
    }
}

#[derive(Debug, Args)]
pub struct ProfileArguments {
    /// An experiment's folder, or a recipe file
    #[arg(value_name = "EXPERIMENT_OR_RECIPE")]
    pub path: PathBuf,
    /// The arm of the experiment [default: its baseline]
    #[arg(long, value_name = "ARM")]
    pub arm: Option<String>,
    /// How many micro-steps to run
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub micro_steps: usize,
    /// Override a field of the recipe, as in packing.kind=bucket; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

#[derive(Debug, Args)]
pub struct MetricsArguments {
    /// A picture, or a folder of pictures (the truth)
    pub a: PathBuf,
    /// A picture, or a folder of pictures (the prediction)
    pub b: PathBuf,
}

#[derive(Debug, Args)]
pub struct DataArguments {
    #[command(subcommand)]
    pub what: Data,
}

/// What can be done with a dataset.
#[derive(Debug, Subcommand)]
pub enum Data {
    /// Episodes, views, clips and identity of a dataset
    Info {
        /// An experiment's folder, a recipe file, or a dataset's folder
        path: PathBuf,
    },
    /// Fit the linear latent codec on the training episodes
    FitCodec {
        /// An experiment's folder, or a recipe file
        path: PathBuf,
    },
    /// How a LingBot-VA recipe's episodes are packed: padding, shapes and waiting, for every kind of packing
    #[command(after_help = PACK_EXAMPLES)]
    Pack {
        /// An experiment's folder, or a recipe file
        path: PathBuf,
        /// Override a field of the recipe, as in packing.ranks=64; may be repeated
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
    /// Read every clip or episode as training does, and list those that can and cannot be trained on
    #[command(after_help = VALIDATE_EXAMPLES)]
    Validate(ValidateArguments),
    /// Read a dataset's cache of geometry tokens whole, and compare it with others
    #[command(after_help = TOKENS_EXAMPLES)]
    Tokens(TokenArguments),
    /// Print `q01` and `q99` of the training episodes' actions, to paste under data.actions
    Quantiles {
        /// An experiment's folder, or a recipe file
        path: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct TokenArguments {
    /// A dataset's folder
    pub dataset: PathBuf,
    /// Dataset whose cache was encoded again from the same pictures: every bit must be the same
    #[arg(long, value_name = "DATASET")]
    pub repeat: Option<PathBuf>,
    /// Dataset whose cache was encoded with this view's pictures replaced: the other views' tokens must change
    #[arg(long, value_name = "VIEW=DATASET")]
    pub replaced: Option<String>,
}

#[derive(Debug, Args)]
pub struct ValidateArguments {
    /// An experiment's folder, or a recipe file
    #[arg(value_name = "EXPERIMENT_OR_RECIPE")]
    pub path: PathBuf,
    /// Folder for verdicts.jsonl, clean.jsonl and rejects.jsonl [default: the experiment's runs/.validate]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// The arm whose recipe reads [default: one with geometry tokens, else the baseline]
    #[arg(long, value_name = "ARM")]
    pub arm: Option<String>,
    /// Exit 65 if more are rejected [default: 0, without --max-reject-share]
    #[arg(long, value_name = "N")]
    pub max_rejects: Option<u64>,
    /// Exit 65 if a larger share is rejected, from 0 to 1
    #[arg(long, value_name = "P")]
    pub max_reject_share: Option<f64>,
    /// Override a field of the recipe, as in data.clip_stride=8; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

#[derive(Debug, Args)]
pub struct WeightsArguments {
    #[command(subcommand)]
    pub what: Weights,
}

/// What can be done with weights.
#[derive(Debug, Subcommand)]
pub enum Weights {
    /// Layout, sizes and dtypes of weight files, and every tensor that does not fit
    Inspect {
        /// A safetensors file, a folder of weights, or a model's folder
        path: PathBuf,
    },
    /// Write a LingBot-VA checkpoint as OUT/transformer/, as it is published
    Export {
        /// A run (its newest complete checkpoint), or one checkpoint of it
        #[arg(value_name = "RUN_OR_CHECKPOINT")]
        from: PathBuf,
        /// Folder for transformer/; what is there already is not replaced
        out: PathBuf,
        /// Format of the numbers
        #[arg(long, value_enum, default_value = "bf16")]
        dtype: WeightDtype,
    },
}

#[derive(Debug, Args)]
pub struct ReportArguments {
    /// Folder with an experiment.yaml
    pub experiment: PathBuf,
    /// Compare points that follow equal numbers of samples at full learning rate, not equal steps
    #[arg(long)]
    pub equal_work: bool,
}
