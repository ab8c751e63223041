//! Computes the stack that a program needs; the kernel reports it only in the verifier's log. Every
//! stack access has its offset from the frame pointer in the instruction.

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::{Context, Result};
use aya_obj::Object;
use aya_obj::generated::bpf_insn;

/// The limit for a program with all called functions, in bytes.
pub(super) const LIMIT: u32 = 512;
/// The unit in bytes to which the kernel rounds up each frame, even an empty one
/// (`check_max_stack_depth` in kernel/bpf/verifier.c).
const FRAME: u32 = 32;

const FRAME_POINTER: u8 = 10;
/// The opcodes of register moves, additions of an immediate, and calls of other functions (RFC 9669
/// §4.1, §4.3).
const MOVE: u8 = 0xbf;
const ADD: u8 = 0x07;
const CALL: u8 = 0x85;
const CALL_LOCAL: u8 = 1;
/// The instruction classes (RFC 9669 §3.1).
const LOAD: u8 = 0x01;
const STORE_NUMBER: u8 = 0x02;
const STORE: u8 = 0x03;

/// Returns each program's stack in bytes.
pub(super) fn bytes(object: &mut Object) -> Result<BTreeMap<String, u32>> {
    let sections: HashSet<usize> = object
        .functions
        .keys()
        .map(|(section, _)| *section)
        .collect();
    object.relocate_calls(&sections)?;
    let programs = object.programs.iter().map(|(name, program)| {
        let function = object
            .functions
            .get(&program.function_key())
            .context("a program without instructions")?;
        Ok((name.clone(), deepest(&function.instructions)))
    });
    programs.collect()
}

/// Returns the stack of the whole program.
fn deepest(program: &[bpf_insn]) -> u32 {
    let mut starts: Vec<usize> = calls(program, 0).map(|(_, target)| target).collect();
    starts.push(0);
    starts.sort_unstable();
    starts.dedup();
    with_called(program, &starts, 0, &mut HashMap::new())
}

/// Returns the stack of the function at `start` with its called functions. The kernel refuses
/// recursion.
fn with_called(
    program: &[bpf_insn],
    starts: &[usize],
    start: usize,
    known: &mut HashMap<usize, u32>,
) -> u32 {
    if let Some(&stack) = known.get(&start) {
        return stack;
    }
    let next = starts.partition_point(|&other| other <= start);
    let end = starts.get(next).copied().unwrap_or(program.len());
    let body = &program[start..end];
    let called = calls(body, start)
        .map(|(_, target)| with_called(program, starts, target, known))
        .max()
        .unwrap_or(0);
    let stack = frame(body).max(1).next_multiple_of(FRAME) + called;
    known.insert(start, stack);
    stack
}

/// Returns the calls of other functions among `instructions`, as pairs of indices. The first
/// instruction is at `start`.
fn calls(instructions: &[bpf_insn], start: usize) -> impl Iterator<Item = (usize, usize)> {
    let calls = instructions
        .iter()
        .enumerate()
        .filter(|(_, insn)| insn.code == CALL && insn.src_reg() == CALL_LOCAL);
    calls.map(move |(n, insn)| {
        (
            start + n,
            (start + n + 1).wrapping_add_signed(insn.imm as isize),
        )
    })
}

/// Returns the size of a function's frame: its lowest offset from the frame pointer.
fn frame(body: &[bpf_insn]) -> u32 {
    let mut lowest = 0;
    // The register that has just received the frame pointer.
    let mut pointer = None;
    for insn in body {
        let offset = match insn.code & 0x07 {
            LOAD if insn.src_reg() == FRAME_POINTER => insn.off.into(),
            STORE | STORE_NUMBER if insn.dst_reg() == FRAME_POINTER => insn.off.into(),
            _ if insn.code == ADD && pointer == Some(insn.dst_reg()) => insn.imm,
            _ => 0,
        };
        lowest = lowest.min(offset);
        let is_copy = insn.code == MOVE && insn.src_reg() == FRAME_POINTER;
        pointer = is_copy
            .then_some(insn.dst_reg())
            .or(pointer.filter(|register| *register != insn.dst_reg()));
    }
    lowest.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> bpf_insn {
        bpf_insn {
            code,
            _bitfield_align_1: [],
            _bitfield_1: bpf_insn::new_bitfield_1(dst, src),
            off,
            imm,
        }
    }

    #[test]
    fn frame_reaches_to_its_lowest_access() {
        const STORE_DOUBLE: u8 = 0x7b;
        let mut body = vec![
            insn(STORE_DOUBLE, FRAME_POINTER, 1, -16, 0),
            insn(STORE_DOUBLE, 2, 1, -80, 0),
        ];
        assert_eq!(frame(&body), 16, "the second is not on the stack");
        body.extend([insn(MOVE, 2, FRAME_POINTER, 0, 0), insn(ADD, 2, 0, 0, -40)]);
        assert_eq!(frame(&body), 40);
        body.push(insn(ADD, 2, 0, 0, -400));
        assert_eq!(frame(&body), 40, "no more than a number");
    }

    #[test]
    fn deepest_chain_of_calls_counts() {
        const STORE_DOUBLE: u8 = 0x7b;
        const EXIT: u8 = 0x95;
        let program = [
            insn(CALL, 0, CALL_LOCAL, 0, 2), // to 3
            insn(CALL, 0, CALL_LOCAL, 0, 4), // to 6
            insn(EXIT, 0, 0, 0, 0),
            insn(STORE_DOUBLE, FRAME_POINTER, 1, -40, 0),
            insn(CALL, 0, CALL_LOCAL, 0, 1), // to 6
            insn(EXIT, 0, 0, 0, 0),
            insn(STORE_DOUBLE, FRAME_POINTER, 1, -8, 0),
            insn(CALL, 0, 0, 0, 5), // a helper
            insn(EXIT, 0, 0, 0, 0),
        ];
        assert_eq!(deepest(&program), 32 + 64 + 32);
    }
}
