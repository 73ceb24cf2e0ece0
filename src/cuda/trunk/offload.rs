//! Items of some blocks on their way to the host's memory and back.
//!
//! Forward, a hosting block's items are copied out as soon as each is written, beside the blocks that follow; backward, they
//! are copied in while the block after is at work. On the device they have two slots, by turns. The last two hosting
//! blocks find theirs where they left them: nothing comes after that needs the room.
//!
//! Two streams meet here, and each hand-over is one event: a slot is written again once its last tenant has been copied out,
//! and read once its tenant has been copied in.

use super::Size;
use super::keep::{Item, KeepPolicy, Kept, SLOTS};
use crate::Result;
use crate::cuda::arena::Arena;
use crate::cuda::host::HostLink;
use crate::cuda::launch::device_error;
use cudarc::driver::{CudaEvent, CudaStream};
use std::sync::Arc;

/// The two ends of a copy; absent while memory is only counted.
type Ends<'h> = Option<(&'h HostLink, Arc<CudaStream>)>;

/// The slots, and what is going on in them.
#[derive(Debug)]
pub(super) struct Offload<'h> {
    policy: KeepPolicy,
    depth: usize,
    /// Hosting blocks, and the bytes of one.
    hosting: (usize, u64),
    operand: usize,
    slots: [Kept; SLOTS],
    /// The last copy from or to each slot.
    copied: [Option<CudaEvent>; SLOTS],
    ends: Ends<'h>,
}

impl<'h> Offload<'h> {
    /// Takes room for the slots, if any block hosts.
    pub fn new(
        policy: &KeepPolicy,
        size: &Size,
        depth: usize,
        host: Option<&'h HostLink>,
        stream: Option<&Arc<CudaStream>>,
        arena: &mut Arena,
    ) -> Result<Self> {
        let mut slots = [Kept::default(); SLOTS];
        if policy.hosting(size).0 > 0 {
            for slot in &mut slots {
                *slot = Kept::hosted(policy, size, arena)?;
            }
        }
        Ok(Self {
            policy: *policy,
            depth,
            hosting: policy.hosting(size),
            operand: size.operand_bytes,
            slots,
            copied: [const { None }; SLOTS],
            ends: host.zip(stream.map(Arc::clone)),
        })
    }

    /// The slot of block `layer`, if it hosts.
    pub fn slot(&self, layer: usize) -> Option<&Kept> {
        self.place(layer).map(|place| &self.slots[place % SLOTS])
    }

    /// Before block `layer` runs, forward or backward: the kernels after this find its slot free, or filled.
    pub fn enter(&mut self, layer: usize) -> Result<()> {
        let Some(place) = self.place(layer) else { return Ok(()) };
        if let (Some((_, stream)), Some(event)) = (&self.ends, self.copied[place % SLOTS].take()) {
            stream.wait(&event).map_err(|error| device_error(error, "waiting for a copy"))?;
        }
        Ok(())
    }

    /// An item of block `layer` has been written for the last time.
    pub fn written(&mut self, layer: usize, item: Item) -> Result<()> {
        let Some(place) = self.place(layer).filter(|place| self.goes_out(*place)) else { return Ok(()) };
        if let Some((host, stream)) = self.ends.as_ref().filter(|_| self.policy.hosts(item, layer, self.depth)) {
            let pieces = self.slots[place % SLOTS].pieces(item, self.operand);
            let offset = place as u64 * self.hosting.1 + self.offset(item, layer);
            self.copied[place % SLOTS] = Some(host.copy_out(stream, &pieces, offset)?);
        }
        Ok(())
    }

    /// Block `layer` has run backward: its slot is for the hosting block before the one before it.
    pub fn done(&mut self, layer: usize) -> Result<()> {
        let Some(next) = self.place(layer).and_then(|place| place.checked_sub(SLOTS)) else { return Ok(()) };
        if let Some((host, stream)) = &self.ends {
            let slot = &self.slots[next % SLOTS];
            let pieces: Vec<_> = Item::BY_VALUE.iter().flat_map(|item| slot.pieces(*item, self.operand)).collect();
            self.copied[next % SLOTS] = Some(host.copy_in(stream, &pieces, next as u64 * self.hosting.1)?);
        }
        Ok(())
    }

    fn place(&self, layer: usize) -> Option<usize> {
        self.policy.hosting_place(layer, self.depth)
    }

    /// Whether the items of a hosting block leave the device.
    fn goes_out(&self, place: usize) -> bool {
        place + SLOTS < self.hosting.0
    }

    /// Where an item lies among its block's.
    fn offset(&self, item: Item, layer: usize) -> u64 {
        let slot = self.slot(layer).copied().unwrap_or_default();
        let before = Item::BY_VALUE.into_iter().take_while(|other| *other != item);
        before.flat_map(|other| slot.pieces(other, self.operand)).map(|(_, bytes)| bytes).sum()
    }
}
