//! How episodes of unequal length share sequences.

pub mod length;
