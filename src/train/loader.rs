//! Batches made ahead of the trainer, on a thread of their own.
//!
//! What a batch is follows from its place in the run alone, so the thread holds no state that a resume would miss.

use crate::{Error, Result};
use crossbeam_channel::{Receiver, bounded};
use std::thread::JoinHandle;

/// Batches in order, a few ahead of their use.
pub(super) struct Loader<B> {
    batches: Option<Receiver<Result<B>>>,
    thread: Option<JoinHandle<()>>,
}

/// Micro-steps made ahead: enough to hide one slow sample, little enough to hold in memory.
const AHEAD: usize = 3;

impl<B: Send + 'static> Loader<B> {
    /// Builds the batches of the given places, in their order.
    pub fn start<P: Send + 'static>(
        places: impl Iterator<Item = P> + Send + 'static,
        build: impl Fn(P) -> Result<B> + Send + 'static,
    ) -> Result<Self> {
        let (sender, receiver) = bounded(AHEAD);
        let thread = std::thread::Builder::new().name("loader".into()).spawn(move || {
            for place in places {
                let batch = build(place);
                let failed = batch.is_err();
                if sender.send(batch).is_err() || failed {
                    return;
                }
            }
        });
        let thread = thread.map_err(|error| Error::crash(format!("cannot start the loader thread: {error}")))?;
        Ok(Self { batches: Some(receiver), thread: Some(thread) })
    }

    /// The next batch in order.
    pub fn next_batch(&mut self) -> Result<B> {
        match self.batches.as_ref().map(Receiver::recv) {
            Some(Ok(batch)) => batch,
            _ => Err(Error::crash("the loader thread ended early; its panic message stands above")),
        }
    }
}

impl<B> Drop for Loader<B> {
    fn drop(&mut self) {
        // Closing the channel first lets a waiting loader see that nobody listens.
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
