//! YAML -> typed, validated configuration; experiment -> arms; arm parity.
mod types;

pub use types::*;
