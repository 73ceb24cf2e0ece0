//! Readers fed with damaged files: a short pass over every kind in the suite, a long one on demand
//! (`FUZZ_SECONDS=600 cargo test --release --test fuzz -- --nocapture --test-threads 1`), of the same readers as cargo-fuzz's targets
//! in fuzz/. This one chooses its damage by dice alone and needs no nightly compiler.

#[path = "../fuzz/src/lib.rs"]
mod readers;

use lbva_tui::random::{Draw, Purpose};
use readers::{Input, Readers};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Seconds for each kind of file if nothing else is asked for.
const SECONDS: u64 = 2;
/// Address space of the whole process: a reader that believes a size in a file meets it. Threads and code take some.
const MOST_BYTES: u64 = 8 << 30;

fn pass(input: Input) {
    let limit = rustix::process::Rlimit { current: Some(MOST_BYTES), maximum: Some(MOST_BYTES) };
    rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
    let readers = Readers::new(Path::new(env!("CARGO_MANIFEST_DIR")));
    let corpus = readers.corpus(input);
    let seconds = std::env::var("FUZZ_SECONDS").ok().map_or(SECONDS, |text| text.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut passes, mut slowest) = (0u64, Duration::ZERO);
    while Instant::now() < until {
        let mut dice = Draw::new(12, Purpose::Order, passes, &format!("{input:?}"));
        let bytes = damaged(&corpus, &mut dice);
        let started = Instant::now();
        let read = catch_unwind(AssertUnwindSafe(|| readers.read(input, &bytes)));
        slowest = slowest.max(started.elapsed());
        if read.is_err() {
            let kept = std::env::temp_dir().join(format!("fuzz-{input:?}-{passes}"));
            std::fs::write(&kept, &bytes).unwrap();
            panic!("{input:?} number {passes} panicked; it is in {}", kept.display());
        }
        passes += 1;
    }
    println!("{input:?}: {passes} damaged files in {seconds} s, the slowest {slowest:.1?}");
    assert!(passes > 20, "{passes}");
    // No file of this size is worth seconds, however busy the machine is.
    assert!(slowest < Duration::from_secs(20), "{slowest:?}");
}

/// A file of the corpus after one to eight damages.
fn damaged(corpus: &[Vec<u8>], dice: &mut Draw) -> Vec<u8> {
    let mut bytes = corpus[dice.below(corpus.len())].clone();
    for _ in 0..=dice.below(8) {
        if bytes.is_empty() {
            break;
        }
        let at = dice.below(bytes.len());
        let most = 2 << dice.below(10);
        let length = 1 + dice.below(most);
        let end = (at + length).min(bytes.len());
        match dice.below(9) {
            0 => bytes[at] ^= 1 << dice.below(8),
            1 => bytes[at] = [0x00, 0x01, 0x7f, 0x80, 0xff, b'0', b'9', b'"', b'{', b'\n'][dice.below(10)],
            2 => drop(bytes.drain(at..end)),
            3 => bytes.truncate(at),
            4 => {
                let copy = bytes[at..end].to_vec();
                let to = dice.below(bytes.len());
                bytes.splice(to..to, copy);
            }
            5 => {
                let other = &corpus[dice.below(corpus.len())];
                let from = dice.below(other.len());
                bytes.splice(at.., other[from..].iter().copied());
            }
            6 => bytes[at..end].fill(dice.below(256) as u8),
            7 => {
                // A size or an offset, in either order of its bytes.
                let number = [0u64, 1, 0x7fff_ffff, 0xffff_ffff, 1 << 33, 1 << 40, u64::MAX][dice.below(7)];
                let width = [2, 4, 8][dice.below(3)];
                let order = if dice.below(2) == 0 {
                    number.to_le_bytes()
                } else {
                    number.rotate_left(64 - 8 * width as u32).to_be_bytes()
                };
                for (byte, new) in bytes[at..].iter_mut().zip(&order[..width]) {
                    *byte = *new;
                }
            }
            _ => {
                // Another number where there is one.
                if let Some(digit) = bytes[at..].iter().position(u8::is_ascii_digit) {
                    let words = ["-1", "1e999", "18446744073709551616", "99999999999", "NaN", "0", "[[[[[[[[", "1.5"];
                    bytes.splice(at + digit..=at + digit, words[dice.below(8)].bytes());
                }
            }
        }
    }
    bytes
}

#[test]
fn the_corpus_itself_is_read() {
    let readers = Readers::new(Path::new(env!("CARGO_MANIFEST_DIR")));
    for input in readers::ALL {
        for bytes in readers.corpus(input) {
            readers.read(input, &bytes);
        }
    }
}

macro_rules! passes {
    ($($name:ident: $input:ident),*) => {
        $(#[test]
        fn $name() {
            pass(Input::$input);
        })*
    };
}

passes!(run_logs: RunLog, manifests: Manifest, recipes: Recipe, metadata: Metadata, rows: Parquet, videos: Video, latent_files: LatentFile);
