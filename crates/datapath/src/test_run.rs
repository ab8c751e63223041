//! Runs a program on a single packet without attaching it (BPF_PROG_TEST_RUN).

use anyhow::{Context, Result};
use aya::programs::{SchedClassifier, TestRun, TestRunOptions};

/// The `struct __sk_buff` (linux/bpf.h) that a program receives with a packet.
#[derive(Clone, Debug)]
pub struct SkBuff([u8; LEN]);

const LEN: usize = 192;

/// A four-byte field of `struct __sk_buff`, by its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field(usize);

impl Field {
    pub const MARK: Self = Self(8);
    pub const INGRESS_IFINDEX: Self = Self(36);
    /// The index of the device on which the kernel runs the program.
    pub const IFINDEX: Self = Self(40);
    pub const GSO_SEGS: Self = Self(164);
    pub const GSO_SIZE: Self = Self(176);
    /// The control block.
    pub const CB: [Self; 5] = [Self(48), Self(52), Self(56), Self(60), Self(64)];
}

#[derive(Clone, Debug)]
pub struct RunOutput {
    /// The returned action (linux/pkt_cls.h).
    pub action: i32,
    /// The length of the resulting packet, which is at the start of `out`.
    pub len: usize,
    pub context: SkBuff,
}

impl SkBuff {
    /// Returns a context with these fields, and zero elsewhere.
    pub fn new(fields: impl IntoIterator<Item = (Field, u32)>) -> Self {
        let mut bytes = [0; LEN];
        for (Field(at), value) in fields {
            bytes[at..][..size_of::<u32>()].copy_from_slice(&value.to_ne_bytes());
        }
        Self(bytes)
    }

    pub fn get(&self, Field(at): Field) -> u32 {
        self.0[at..]
            .first_chunk()
            .map_or(0, |value| u32::from_ne_bytes(*value))
    }
}

/// Runs `program` once. Truncates the resulting packet to the length of `out`. Without a context
/// the packet is on lo, which the kernel accepts in no other form.
pub fn test_run(
    program: &SchedClassifier,
    packet: &[u8],
    context: Option<&SkBuff>,
    out: &mut [u8],
) -> Result<RunOutput> {
    let mut context_out = SkBuff([0; LEN]);
    let mut options = TestRunOptions::new();
    options.data_in = Some(packet);
    options.data_out = (!out.is_empty()).then_some(out);
    options.ctx_in = context.map(|context| context.0.as_slice());
    options.ctx_out = context.map(|_| context_out.0.as_mut_slice());
    let result = program
        .test_run(options)
        .with_context(|| format!("run on a packet of {} bytes", packet.len()))?;
    let action = result.return_value.cast_signed();
    let len = result.data_size_out as usize;
    Ok(RunOutput {
        action,
        len,
        context: context_out,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_keeps_its_fields_apart() {
        let fields = [(Field::MARK, 1), (Field::IFINDEX, 2), (Field::GSO_SIZE, 3)];
        let context = SkBuff::new(fields);
        assert_eq!(fields.map(|(field, _)| context.get(field)), [1, 2, 3]);
        assert_eq!(context.get(Field::INGRESS_IFINDEX), 0);
    }
}
