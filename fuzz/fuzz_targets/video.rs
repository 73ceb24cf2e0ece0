#![no_main]

use lbva_tui_fuzz::{Input, Readers};
use std::path::Path;
use std::sync::LazyLock;

static READERS: LazyLock<Readers> =
    LazyLock::new(|| Readers::new(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| READERS.read(Input::Video, bytes));
