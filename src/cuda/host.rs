//! The host's memory as a second place for what a pass keeps: pinned, so that the GPU copies to and from it by itself.
//!
//! Pinning takes from two seconds to twenty for as much as a pass may want, so threads do it in the background, chunk by chunk.
//! How much there may be is asked of the machine once, when the first batch is there: by then whoever loaded weights has
//! given their memory back.

use super::device::Gpu;
use super::launch::device_error;
use super::spare;
use crate::{Error, Exit, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// GiB of the host's memory that a process may pin, at most.
pub(crate) const LIMIT_VARIABLE: &str = "LBVA_TUI_HOST_GIB";

/// Bytes that are mapped and pinned at once.
const CHUNK: usize = 128 << 20;
/// After each chunk, for whoever else calls the driver.
const BREATH: Duration = Duration::from_millis(1);
/// The smallest page of x86-64 and most others.
const PAGE: usize = 4096;
/// Threads that fill and pin, at most.
const THREADS: usize = 16;
/// Of what the machine has available and this process will not need for itself, the share that it and those on the other GPUs
/// take at most: data loading and the page cache live in the rest.
const SHARE: f64 = 0.6;
/// Of a PCIe link's nominal bytes, those to count on: 55 of 63 GB/s arrive, and a pass that waits for its link loses more than
/// the copies save.
const EFFICIENCY: f64 = 0.83;

/// Room in the host's memory, and how fast one gets there.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostRoom {
    pub bytes: u64,
    pub bytes_per_second: f64,
}

/// Pinned memory and the stream that copies to and from it.
#[derive(Debug)]
pub(crate) struct HostLink {
    /// Bytes that were asked for; `None`: what the machine has to spare.
    limit: Option<u64>,
    /// What this process will need itself, and GPUs to share with.
    spoken_for: u64,
    gpus: u32,
    bytes_per_second: f64,
    room: Option<HostRoom>,
    copies: Arc<CudaStream>,
    context: Arc<CudaContext>,
    pinning: Arc<Mutex<()>>,
    chunks: Chunks,
}

/// Chunks of memory that threads make in the background, in order.
#[derive(Debug, Default)]
struct Chunks {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Address of each chunk, or why there is none; absent until it is made.
    made: Vec<Option<Made>>,
    /// The first that nobody has begun with.
    next: usize,
    /// Threads that make them.
    at_work: usize,
    stop: bool,
}

type Made = std::result::Result<usize, String>;

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes chunks until all are begun.
    fn work(&self, make: &dyn Fn() -> Made) {
        loop {
            let mut state = self.lock();
            if state.stop || state.next == state.made.len() {
                // Under the lock: who reserves more knows whether this thread will still see it.
                state.at_work -= 1;
                return;
            }
            let index = state.next;
            state.next += 1;
            drop(state);
            let chunk = make();
            self.lock().made[index] = Some(chunk);
            self.changed.notify_all();
        }
    }
}

impl Chunks {
    /// Begins to make so many in all with at most `threads` threads, unless that was asked for before.
    fn reserve(&mut self, wanted: usize, threads: usize, make: impl Fn() -> Made + Clone + Send + 'static) {
        let mut state = self.shared.lock();
        if wanted <= state.made.len() {
            return;
        }
        state.made.resize(wanted, None);
        for _ in state.at_work..threads.min(wanted) {
            let (shared, make) = (Arc::clone(&self.shared), make.clone());
            if let Ok(thread) = std::thread::Builder::new().name("pin".into()).spawn(move || shared.work(&make)) {
                self.threads.push(thread);
                state.at_work += 1;
            }
        }
        if state.at_work == 0 {
            let next = state.next;
            state.made[next..].fill(Some(Err("no thread could be started to pin the host's memory".into())));
            state.next = wanted;
        }
    }

    /// The address of a chunk that was reserved, as soon as it is there.
    fn wait(&self, index: usize) -> Result<usize> {
        let mut state = self.shared.lock();
        loop {
            match state.made.get(index) {
                Some(Some(Ok(address))) => return Ok(*address),
                Some(Some(Err(what))) => {
                    return Err(Error::new(Exit::Unavailable, "host_memory", what)
                        .hint(format!("set {LIMIT_VARIABLE} to fewer GiB, or to 0: then values are computed again")));
                }
                Some(None) => state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                None => return Err(Error::crash(format!("chunk {index} of the host's memory was not asked for"))),
            }
        }
    }

    /// Ends the threads; the chunks that they made are the caller's.
    fn finish(&mut self) -> Vec<usize> {
        self.shared.lock().stop = true;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.shared.lock().made.drain(..).flatten().flatten().collect()
    }
}

impl HostLink {
    /// A link to as much of the host's memory as this process may take, beside `spoken_for` bytes that it will need itself; none
    /// of it is taken yet.
    ///
    /// # Errors
    /// If [`LIMIT_VARIABLE`] is no number, or the device has no further stream.
    pub fn open(gpu: &Gpu, spoken_for: u64) -> Result<Self> {
        let context = Arc::clone(gpu.stream.context());
        let copies = context.new_stream().map_err(|error| device_error(error, "opening a stream for copies"))?;
        let asked = std::env::var_os(LIMIT_VARIABLE).filter(|text| !text.is_empty());
        Ok(Self {
            limit: asked.map(|text| asked_for(&text.to_string_lossy())).transpose()?,
            spoken_for,
            gpus: gpu.gpus_of_machine(),
            bytes_per_second: EFFICIENCY * gpu.link_bytes_per_second().unwrap_or(0.0),
            room: None,
            copies,
            context,
            pinning: Arc::default(),
            chunks: Chunks::default(),
        })
    }

    /// At most this many bytes.
    pub fn limit(&mut self, bytes: u64) {
        self.limit = Some(bytes);
        self.room = None;
    }

    /// What there is room for; the first call measures it.
    pub fn room(&mut self) -> HostRoom {
        let (limit, spoken_for, gpus, bytes_per_second) =
            (self.limit, self.spoken_for, self.gpus, self.bytes_per_second);
        *self.room.get_or_insert_with(|| {
            let bytes = limit.unwrap_or_else(|| to_spare(spare::available(), spoken_for, gpus));
            HostRoom { bytes, bytes_per_second }
        })
    }

    /// Begins to pin so many bytes in all, unless that was asked for before.
    pub fn reserve(&mut self, bytes: u64) {
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(THREADS));
        let (context, pinning) = (Arc::clone(&self.context), Arc::clone(&self.pinning));
        self.chunks.reserve(bytes.div_ceil(CHUNK as u64) as usize, threads, move || {
            pin(&context, &pinning).map_err(|reason| format!("pinning {CHUNK} bytes of the host's memory: {reason}"))
        });
    }

    /// Bytes that are pinned.
    pub fn pinned_bytes(&self) -> u64 {
        let made = self.chunks.shared.lock().made.iter().filter(|chunk| matches!(chunk, Some(Ok(_)))).count();
        (made * CHUNK) as u64
    }

    /// Waits until so many bytes are there, which were reserved.
    ///
    /// # Errors
    /// `host_memory` if the system gives no more, or the driver cannot pin it.
    pub fn wait_for(&self, bytes: u64) -> Result<()> {
        (0..bytes.div_ceil(CHUNK as u64) as usize).try_for_each(|index| self.chunks.wait(index).map(|_| ()))
    }

    /// Waits until all copies are done: an arena may be given back then.
    pub fn synchronize(&self) -> Result<()> {
        self.copies.synchronize().map_err(|error| device_error(error, "waiting for copies to the host"))
    }

    /// Copies `bytes` from the device to `offset` of this memory, after what `stream` was asked until now. The event tells when
    /// that is done.
    pub fn copy_out(&self, stream: &CudaStream, pieces: &[(u64, u64)], offset: u64) -> Result<CudaEvent> {
        self.copy(stream, pieces, offset, |host, device, bytes| {
            // SAFETY: both ends are `bytes` long in live memory, see `copy`.
            unsafe { sys::cuMemcpyDtoHAsync_v2(host, device, bytes, self.copies.cu_stream()) }
        })
    }

    /// The other way.
    pub fn copy_in(&self, stream: &CudaStream, pieces: &[(u64, u64)], offset: u64) -> Result<CudaEvent> {
        self.copy(stream, pieces, offset, |host, device, bytes| {
            // SAFETY: as above.
            unsafe { sys::cuMemcpyHtoDAsync_v2(device, host.cast_const(), bytes, self.copies.cu_stream()) }
        })
    }

    /// Pieces (address, bytes) of device memory, which must live until the copy is done, beside each other from `offset` on.
    fn copy(
        &self,
        stream: &CudaStream,
        pieces: &[(u64, u64)],
        offset: u64,
        transfer: impl Fn(*mut c_void, u64, usize) -> sys::CUresult,
    ) -> Result<CudaEvent> {
        let failed = |error| device_error(error, "copying between GPU and host");
        self.copies.join(stream).map_err(failed)?;
        let mut at = offset as usize;
        for &(mut device, bytes) in pieces {
            let mut left = bytes as usize;
            while left > 0 {
                let within = at % CHUNK;
                let bytes = left.min(CHUNK - within);
                // SAFETY (of the pointer): `within` is less than the chunk's length.
                let host = (self.chunks.wait(at / CHUNK)? + within) as *mut c_void;
                transfer(host, device, bytes).result().map_err(failed)?;
                (at, left, device) = (at + bytes, left - bytes, device + bytes as u64);
            }
        }
        self.copies.record_event(None).map_err(failed)
    }
}

/// Bytes of so many GiB.
fn asked_for(text: &str) -> Result<u64> {
    match text.trim().parse::<f64>() {
        Ok(gib) if gib >= 0.0 => Ok((gib * f64::from(1 << 30)) as u64),
        _ => {
            let what = format!("{LIMIT_VARIABLE}={text} is no number of GiB");
            Err(Error::usage("host_memory", what).hint("0 has nothing kept in the host's memory"))
        }
    }
}

/// What a process may take of `available` bytes.
fn to_spare(available: u64, spoken_for: u64, gpus: u32) -> u64 {
    (available.saturating_sub(spoken_for) as f64 * SHARE / f64::from(gpus.max(1))) as u64
}

impl Drop for HostLink {
    fn drop(&mut self) {
        let chunks = self.chunks.finish();
        // What is still being copied reads and writes the chunks; after an error of the device nothing is.
        let _ = self.copies.synchronize();
        let bound = self.context.bind_to_thread().is_ok();
        for address in chunks {
            let address = address as *mut c_void;
            // SAFETY: mapped and pinned by `pin`, and nobody uses it any more.
            unsafe {
                if bound {
                    let _ = sys::cuMemHostUnregister(address);
                }
                let _ = munmap(address, CHUNK);
            }
        }
    }
}

/// A chunk of memory that the device can reach. `pinning` is held while the driver pins, which it does under locks that its
/// every other function needs: several threads by turns would never let the one that launches kernels in.
fn pin(context: &Arc<CudaContext>, pinning: &Mutex<()>) -> std::result::Result<usize, String> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping of its own, at an address that the system chooses.
    let address = unsafe { mmap_anonymous(std::ptr::null_mut(), CHUNK, protection, MapFlags::PRIVATE) }
        .map_err(|error| error.to_string())?;
    // Large pages halve the time; where there are none, small ones do.
    // SAFETY: the range is the mapping made above, whose contents nobody has yet.
    let _ = unsafe { madvise(address, CHUNK, Advice::LinuxHugepage) };
    // The system gives pages at their first use, here to many threads at once; asked for all of a range (by advice, or by the
    // driver) it does so one range at a time.
    for page in (0..CHUNK).step_by(PAGE) {
        // SAFETY: inside of the mapping, which nobody else knows.
        unsafe { address.cast::<u8>().add(page).write_volatile(0) };
    }
    let pinned = context.bind_to_thread().map_err(|error| error.to_string()).and_then(|()| {
        let _one_at_a_time = pinning.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range is mapped until `HostLink` is dropped.
        let pinned = unsafe { sys::cuMemHostRegister_v2(address, CHUNK, 0) }.result();
        std::thread::sleep(BREATH);
        pinned.map_err(|error| error.to_string())
    });
    if let Err(reason) = pinned {
        // SAFETY: mapped above and known to nobody.
        let _ = unsafe { munmap(address, CHUNK) };
        return Err(reason);
    }
    Ok(address as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number_of_gib() {
        assert_eq!(asked_for("0").expect("none"), 0);
        assert_eq!(asked_for(" 1.5 ").expect("a number"), 3 << 29);
        for text in ["", "-1", "NaN", "12GB", "all"] {
            let error = asked_for(text).expect_err(text);
            assert_eq!(error.code, "host_memory");
            assert!(error.what.contains(LIMIT_VARIABLE), "{error}");
        }
    }

    #[test]
    fn chunks_come_in_order_and_more_can_be_asked_for() {
        let mut chunks = Chunks::default();
        let made = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let make = move || Ok(made.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1);
        for wanted in [1, 1, 7, 3, 40] {
            chunks.reserve(wanted, 4, make.clone());
            (0..wanted).for_each(|index| assert!(chunks.wait(index).is_ok()));
        }
        assert_eq!(chunks.wait(40).expect_err("beyond").code, "crash");
        let mut all = chunks.finish();
        all.sort_unstable();
        assert!(all.into_iter().eq(1..=40), "each was made once");
    }

    #[test]
    fn a_chunk_that_cannot_be_made_is_told_and_nobody_waits_for_it() {
        let mut chunks = Chunks::default();
        chunks.reserve(3, 1, || Err("no more".into()));
        let error = chunks.wait(2).expect_err("no chunk");
        assert!(error.code == "host_memory" && error.what.contains("no more"), "{error}");
        let mut nobody = Chunks::default();
        nobody.reserve(2, 0, || Ok(1));
        assert!(nobody.wait(1).expect_err("no thread").what.contains("no thread"));
        assert_eq!((chunks.finish().len(), nobody.finish().len()), (0, 0));
    }

    #[test]
    fn a_process_leaves_what_it_and_others_need() {
        assert_eq!(to_spare(1000, 0, 1), 600);
        assert_eq!(to_spare(1000, 500, 2), 150);
        assert_eq!(to_spare(1000, 2000, 1), 0, "a checkpoint's copy comes first");
        assert_eq!(to_spare(1000, 0, 0), 600);
    }
}
