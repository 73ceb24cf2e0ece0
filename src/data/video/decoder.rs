//! H.264 samples -> pictures in display order.
//!
//! openh264 is fed with `Flush::NoFlush` and drained at the end: its default flushes after every call, and a stream
//! with B-frames then loses half of its pictures. It returns pictures in display order and no name for them, so the
//! n-th picture out belongs to the n-th fed sample in composition order; a missing picture is an error, never a shift.

use openh264::OpenH264API;
use openh264::decoder::{DecodeOptions, DecodedYUV, Decoder, DecoderConfig, Flush};
use openh264::formats::YUVSource;

use super::Picture;

/// Why decoding stopped.
pub(super) enum Fault {
    /// The decoder or the bitstream failed at this fed sample (counted from 0, in decode order).
    Sample { fed: usize, why: String },
    /// Fewer or more pictures came out than samples went in.
    Count { fed: usize, pictures: usize },
    /// The decoder itself cannot be used.
    Decoder(String),
}

/// Feeds `samples` (length-prefixed NAL units, the first one a sync sample) and hands on the pictures whose place in
/// the output order is marked in `wanted`; `wanted` is as long as `samples`. Pictures come before a fault is known.
pub(super) fn decode(
    parameter_sets: &[Vec<u8>],
    nal_length_size: usize,
    samples: &[&[u8]],
    wanted: &[bool],
    each: &mut dyn FnMut(Picture),
) -> Result<(), Fault> {
    let unusable = |error: openh264::Error| Fault::Decoder(describe(&error));
    let mut decoder =
        Decoder::with_api_config(OpenH264API::from_source(), DecoderConfig::new().flush_after_decode(Flush::NoFlush))
            .map_err(unusable)?;
    let mut output = Output { wanted, each, count: 0 };
    let mut packet = Vec::new();
    for (fed, sample) in samples.iter().enumerate() {
        packet.clear();
        if fed == 0 {
            for unit in parameter_sets {
                append(&mut packet, unit);
            }
        }
        let fault = |why| Fault::Sample { fed, why };
        append_sample(&mut packet, sample, nal_length_size).map_err(fault)?;
        let options = DecodeOptions::new().flush_after_decode(Flush::NoFlush);
        let decoded = decoder.decode_with_options(&packet, options).map_err(|error| fault(describe(&error)))?;
        if let Some(decoded) = decoded {
            output.take(&decoded).map_err(fault)?;
        }
    }
    for decoded in decoder.flush_remaining().map_err(unusable)? {
        output.take(&decoded).map_err(Fault::Decoder)?;
    }
    if output.count != samples.len() {
        return Err(Fault::Count { fed: samples.len(), pictures: output.count });
    }
    Ok(())
}

struct Output<'a> {
    wanted: &'a [bool],
    each: &'a mut dyn FnMut(Picture),
    count: usize,
}

impl Output<'_> {
    fn take(&mut self, decoded: &DecodedYUV<'_>) -> Result<(), String> {
        if self.wanted.get(self.count).copied().unwrap_or(false) {
            (self.each)(copy(decoded)?);
        }
        self.count += 1;
        Ok(())
    }
}

/// The native state is all that openh264 says; its `Display` adds noise about backtraces.
fn describe(error: &openh264::Error) -> String {
    format!("openh264 state {}", error.native_code())
}

fn append(packet: &mut Vec<u8>, unit: &[u8]) {
    packet.extend_from_slice(&[0, 0, 0, 1]);
    packet.extend_from_slice(unit);
}

/// The NAL units of a sample up to the first that is cut off.
pub(super) fn units(sample: &[u8], nal_length_size: usize) -> impl Iterator<Item = &[u8]> {
    let mut rest = sample;
    std::iter::from_fn(move || {
        let (prefix, after) = rest.split_at_checked(nal_length_size)?;
        let (unit, after) = after.split_at_checked(be_length(prefix))?;
        rest = after;
        Some(unit)
    })
}

fn be_length(prefix: &[u8]) -> usize {
    prefix.iter().fold(0, |value, byte| value << 8 | usize::from(*byte))
}

/// Replaces each length prefix by a start code (ISO/IEC 14496-15 5.3 -> ITU-T H.264 annex B).
fn append_sample(packet: &mut Vec<u8>, sample: &[u8], nal_length_size: usize) -> Result<(), String> {
    let mut rest = sample;
    while !rest.is_empty() {
        let Some((prefix, after)) = rest.split_at_checked(nal_length_size) else {
            return Err("a NAL unit's length is cut off".into());
        };
        let Some((unit, after)) = after.split_at_checked(be_length(prefix)) else {
            return Err("a NAL unit is longer than its sample".into());
        };
        append(packet, unit);
        rest = after;
    }
    Ok(())
}

/// Planes without the decoder's row padding.
fn copy(decoded: &DecodedYUV<'_>) -> Result<Picture, String> {
    let (width, height) = decoded.dimensions();
    let (chroma_width, chroma_height) = (width.div_ceil(2), height.div_ceil(2));
    let (y_stride, u_stride, v_stride) = decoded.strides();
    let plane = |bytes: &[u8], stride: usize, width: usize, height: usize| {
        let mut rows = Vec::with_capacity(width * height);
        for row in 0..height {
            let start = row * stride;
            rows.extend_from_slice(bytes.get(start..start + width).ok_or("the decoder returned a short plane")?);
        }
        Ok::<_, String>(rows)
    };
    Ok(Picture {
        width,
        height,
        y: plane(decoded.y(), y_stride, width, height)?,
        u: plane(decoded.u(), u_stride, chroma_width, chroma_height)?,
        v: plane(decoded.v(), v_stride, chroma_width, chroma_height)?,
    })
}
