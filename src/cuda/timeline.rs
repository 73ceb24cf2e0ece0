//! Where the time of a pass goes, kernel by kernel: marks in the stream around every launch, read when all of it is done.
//!
//! Recording is off but for `bench trunk --kernels`: marks cost some microseconds each.

use super::launch::device_error;
use crate::Result;
use cudarc::driver::{CudaEvent, CudaStream, sys};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Launches alike, and the time of all of them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct KernelTime {
    pub name: String,
    pub calls: usize,
    pub ms: f64,
}

/// Launches of a stream in their order; nothing while it is off.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    spans: Mutex<Option<Vec<(String, CudaEvent, CudaEvent)>>>,
}

impl Timeline {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<(String, CudaEvent, CudaEvent)>>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to record.
    pub fn begin(&self) {
        *self.lock() = Some(Vec::new());
    }

    /// Does `work`, which asks the stream for something, between two marks if this is on.
    pub fn around<T>(
        &self,
        stream: &CudaStream,
        name: impl FnOnce() -> String,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.lock().is_none() {
            return work();
        }
        let mark = || {
            let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
            stream.record_event(flags).map_err(|error| device_error(error, "recording an event"))
        };
        let begun = mark()?;
        let done = work()?;
        let ended = mark()?;
        if let Some(spans) = self.lock().as_mut() {
            spans.push((name(), begun, ended));
        }
        Ok(done)
    }

    /// What was recorded, the longest first, and nothing more from here on. The stream must have done all of it.
    pub fn end(&self) -> Result<Vec<KernelTime>> {
        let mut times = BTreeMap::<String, (usize, f64)>::new();
        for (name, begun, ended) in self.lock().take().unwrap_or_default() {
            let ms = begun.elapsed_ms(&ended).map_err(|error| device_error(error, "reading the device's clock"))?;
            let (calls, sum) = times.entry(name).or_default();
            *calls += 1;
            *sum += f64::from(ms);
        }
        let mut times: Vec<_> = times.into_iter().map(|(name, (calls, ms))| KernelTime { name, calls, ms }).collect();
        times.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        Ok(times)
    }
}
