//! Finds loops that are closed by fall-through instead of a jump. Kernels up to at least 6.1 refuse
//! them, in a check before the verifier. Newer kernels accept them, so a successful load there
//! proves nothing.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use aya_obj::Object;
use aya_obj::generated::bpf_insn;

/// The classes and operations of instructions (RFC 9669 §3.1, §4.3).
const CLASS: u8 = 0x07;
const JUMP: u8 = 0x05;
const JUMP32: u8 = 0x06;
const OPERATION: u8 = 0xf0;
const ALWAYS: u8 = 0x00;
const CALL: u8 = 0x80;
const EXIT: u8 = 0x90;
const CALL_LOCAL: u8 = 1;

/// Fails with each place where a program returns to an earlier instruction without a jump.
pub(super) fn check(object: &mut Object) -> Result<()> {
    let sections: HashSet<usize> = object
        .functions
        .keys()
        .map(|(section, _)| *section)
        .collect();
    object.relocate_calls(&sections)?;
    let mut bad = Vec::new();
    for (name, program) in &object.programs {
        let function = object
            .functions
            .get(&program.function_key())
            .with_context(|| format!("{name} has no code"))?;
        let ways = without_jump(&function.instructions);
        bad.extend(
            ways.into_iter()
                .map(|(from, to)| format!("{name} comes from instruction {from} back to {to}")),
        );
    }
    ensure!(
        bad.is_empty(),
        "old kernels refuse ways back without a jump: {}",
        bad.join(", ")
    );
    Ok(())
}

/// Returns the back edges that are not jumps, as pairs of instruction indices: from, to.
fn without_jump(program: &[bpf_insn]) -> Vec<(usize, usize)> {
    #[derive(Clone, Copy, PartialEq)]
    enum State {
        New,
        /// The instruction is on the current path.
        Open,
        Done,
    }
    let mut states = vec![State::New; program.len()];
    // The instructions of the path, each with the index of its next successor.
    let mut way = vec![(0, 0)];
    let mut found = Vec::new();
    while let Some((at, nth)) = way.last_mut() {
        let from = *at;
        states[from] = State::Open;
        let Some(&to) = successors(program, from).get(*nth) else {
            states[from] = State::Done;
            way.pop();
            continue;
        };
        *nth += 1;
        match states.get(to) {
            Some(State::New) => way.push((to, 0)),
            Some(State::Open) if !is_jump(program[from]) => found.push((from, to)),
            // The instruction was visited on another path, or is beyond the end of a program, which
            // the kernel refuses.
            _ => {}
        }
    }
    found
}

/// Returns the possible successors of the instruction at `at`, including called functions.
fn successors(program: &[bpf_insn], at: usize) -> Vec<usize> {
    let insn = program[at];
    let target = |offset: isize| (at + 1).wrapping_add_signed(offset);
    match insn.code & OPERATION {
        _ if !matches!(insn.code & CLASS, JUMP | JUMP32) => vec![at + 1],
        EXIT => vec![],
        CALL if insn.src_reg() == CALL_LOCAL => vec![at + 1, target(insn.imm as isize)],
        CALL => vec![at + 1],
        ALWAYS if insn.code & CLASS == JUMP32 => vec![target(insn.imm as isize)],
        ALWAYS => vec![target(insn.off.into())],
        _ => vec![at + 1, target(insn.off.into())],
    }
}

/// Returns true for a jump. A call counts as fall-through to the next instruction.
fn is_jump(insn: bpf_insn) -> bool {
    matches!(insn.code & CLASS, JUMP | JUMP32) && insn.code & OPERATION != CALL
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADD: u8 = 0x07;
    const IF_LESS: u8 = 0xa5;

    fn insn(code: u8, src: u8, off: i16, imm: i32) -> bpf_insn {
        bpf_insn {
            code,
            _bitfield_align_1: [],
            _bitfield_1: bpf_insn::new_bitfield_1(0, src),
            off,
            imm,
        }
    }

    #[test]
    fn jump_may_go_back() {
        let program = [
            insn(ADD, 0, 0, 1),
            insn(JUMP | IF_LESS, 0, -2, 9),
            insn(JUMP, 0, -3, 0),
            insn(JUMP | EXIT, 0, 0, 0),
        ];
        assert_eq!(without_jump(&program), []);
    }

    #[test]
    fn other_instruction_must_not_go_back() {
        let add = insn(ADD, 0, 0, 1);
        for last in [add, insn(JUMP | CALL, 0, 0, 5)] {
            // The entry jumps over the instruction before the loop's start: 0, 2, 3, then 1, and 2
            // again.
            let program = [
                insn(JUMP, 0, 1, 0),
                last,
                insn(JUMP | IF_LESS, 0, 1, 9),
                insn(JUMP, 0, -3, 0),
                insn(0x95, 0, 0, 0),
            ];
            assert_eq!(without_jump(&program), [(1, 2)]);
        }
    }

    #[test]
    fn functions_are_followed_where_they_are_called() {
        let program = [
            insn(JUMP | CALL, CALL_LOCAL, 0, 1), // to 2
            insn(JUMP | EXIT, 0, 0, 0),
            insn(JUMP, 0, 1, 0),
            insn(ADD, 0, 0, 1),
            insn(JUMP | IF_LESS, 0, -2, 9),
            insn(JUMP | EXIT, 0, 0, 0),
        ];
        assert_eq!(without_jump(&program), [(3, 4)]);
    }
}
