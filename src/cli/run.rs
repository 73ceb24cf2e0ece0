//! `run`
