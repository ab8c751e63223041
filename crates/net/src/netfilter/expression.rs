//! Parses the expressions of a rule as the kernel sends them (linux/netfilter/nf_tables.h). An
//! unknown match may hold, and an unknown statement may change the packet.

use anyhow::Result;

use super::attrs::Attrs;
use super::model::{Field, Part, Rule, Verdict};
use super::packet::{NEW, RTN_LOCAL};
use super::registers::Registers;
use super::xt;

const NFTA_LIST_ELEM: u16 = 1;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;

const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
const NFTA_VERDICT_CHAIN: u16 = 2;

const NFT_REG_VERDICT: u32 = 0;

const NFTA_PAYLOAD_DREG: u16 = 1;
const NFTA_PAYLOAD_BASE: u16 = 2;
const NFTA_PAYLOAD_OFFSET: u16 = 3;
const NFTA_PAYLOAD_LEN: u16 = 4;
const NFT_PAYLOAD_NETWORK_HEADER: u32 = 1;

const NFTA_META_DREG: u16 = 1;
const NFTA_META_KEY: u16 = 2;
const NFTA_META_SREG: u16 = 3;
const NFT_META_PROTOCOL: u32 = 1;
const NFT_META_MARK: u32 = 3;
const NFT_META_IIFNAME: u32 = 6;
const NFT_META_OIFNAME: u32 = 7;
const NFT_META_NFTRACE: u32 = 12;
const NFT_META_NFPROTO: u32 = 15;
const NFT_META_L4PROTO: u32 = 16;
/// The length of a zero-padded device name.
const IFNAMSIZ: usize = 16;

const NFTA_FIB_DREG: u16 = 1;
const NFTA_FIB_RESULT: u16 = 2;
const NFTA_FIB_FLAGS: u16 = 3;
const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
const NFTA_FIB_F_DADDR: u32 = 2;

const NFTA_BITWISE_SREG: u16 = 1;
const NFTA_BITWISE_DREG: u16 = 2;
const NFTA_BITWISE_MASK: u16 = 4;
const NFTA_BITWISE_XOR: u16 = 5;
const NFTA_BITWISE_OP: u16 = 6;
const NFT_BITWISE_MASK_XOR: u32 = 0;

const NFTA_CMP_SREG: u16 = 1;
const NFTA_CMP_OP: u16 = 2;
const NFTA_CMP_DATA: u16 = 3;
const NFT_CMP_EQ: u32 = 0;
const NFT_CMP_NEQ: u32 = 1;

const NFTA_IMMEDIATE_DREG: u16 = 1;
const NFTA_IMMEDIATE_DATA: u16 = 2;

const NFTA_LOOKUP_DREG: u16 = 3;

/// The registers that `ct` and `exthdr` load. Without a register, both are statements.
const NFTA_CT_DREG: u16 = 1;
const NFTA_CT_KEY: u16 = 2;
const NFTA_CT_DIRECTION: u16 = 3;
const NFT_CT_STATE: u32 = 0;
const NFTA_EXTHDR_DREG: u16 = 1;

/// The type of a named object that a rule uses.
const NFTA_OBJREF_IMM_TYPE: u16 = 1;
const NFT_OBJECT_COUNTER: u32 = 1;
const NFT_OBJECT_QUOTA: u32 = 2;
const NFT_OBJECT_LIMIT: u32 = 4;
const NFT_OBJECT_CONNLIMIT: u32 = 5;

const NFTA_NAT_TYPE: u16 = 1;
const NFT_NAT_SNAT: u32 = 0;

/// The verdicts (linux/netfilter.h; the negative verdicts in `enum nft_verdicts`).
const NF_DROP: i32 = 0;
const NF_ACCEPT: i32 = 1;
const NFT_CONTINUE: i32 = -1;
const NFT_BREAK: i32 = -2;
const NFT_JUMP: i32 = -3;
const NFT_GOTO: i32 = -4;
const NFT_RETURN: i32 = -5;

#[derive(Default)]
struct Reader {
    rule: Rule,
    registers: Registers,
}

pub(super) fn rule(list: &Attrs) -> Result<Rule> {
    let mut reader = Reader::default();
    for expression in list.all(NFTA_LIST_ELEM) {
        let expression = Attrs::parse(expression)?;
        reader.read(
            expression.text(NFTA_EXPR_NAME).unwrap_or("?"),
            &expression.inside(NFTA_EXPR_DATA)?,
        )?;
    }
    Ok(reader.rule)
}

impl Reader {
    fn read(&mut self, name: &str, data: &Attrs) -> Result<()> {
        match name {
            // Counters have no effect: every iptables rule has one.
            "counter" | "last" => {}
            "objref" => self.object(data),
            "range" | "limit" | "quota" | "connlimit" => self.maybe(),
            "rt" | "numgen" | "hash" | "socket" | "osf" | "xfrm" | "tunnel" | "byteorder" => {
                self.unknown_load()
            }
            "ct" if data.has(NFTA_CT_DREG) => self.ct(data),
            "exthdr" if data.has(NFTA_EXTHDR_DREG) => self.unknown_load(),
            "payload" => self.payload(data),
            "meta" => self.meta(data),
            "fib" => self.fib(data),
            "bitwise" => self.bitwise(data)?,
            "cmp" => self.cmp(data)?,
            "lookup" => match data.u32(NFTA_LOOKUP_DREG) {
                Some(NFT_REG_VERDICT) => self.change("look up a verdict map"),
                Some(_) => self.unknown_load(),
                None => self.maybe(),
            },
            "immediate" => self.immediate(data)?,
            "reject" => self.refuse("reject the packet"),
            "queue" => self.refuse("hand the packet to a program"),
            "match" => self.rule.extend(xt::matched(data)),
            "target" => self.rule.push(xt::target(data)),
            "masq" => self.change("masquerade"),
            "redir" => self.change("redirect"),
            "nat" if data.u32(NFTA_NAT_TYPE) == Some(NFT_NAT_SNAT) => {
                self.change("translate the source")
            }
            "nat" => self.change("translate the destination"),
            "log" => self.change("log the packet"),
            "dynset" => self.change("update a set"),
            "notrack" => self.change("keep conntrack from following"),
            "flow_offload" => self.change("hand the connection to a flow table"),
            _ => self.change(&format!("apply {name}")),
        }
        Ok(())
    }

    fn object(&mut self, data: &Attrs) {
        match data.u32(NFTA_OBJREF_IMM_TYPE) {
            Some(NFT_OBJECT_COUNTER) => {}
            Some(NFT_OBJECT_QUOTA | NFT_OBJECT_LIMIT | NFT_OBJECT_CONNLIMIT) => self.maybe(),
            _ => self.change("apply an object"),
        }
    }

    fn ct(&mut self, data: &Attrs) {
        let is_state = data.u32(NFTA_CT_KEY) == Some(NFT_CT_STATE) && !data.has(NFTA_CT_DIRECTION);
        match data.u32(NFTA_CT_DREG).filter(|_| is_state) {
            Some(to) => self.registers.load(to, Field::State, size_of_val(&NEW)),
            None => self.unknown_load(),
        }
    }

    fn maybe(&mut self) {
        self.rule.push(Part::Maybe);
    }

    fn refuse(&mut self, what: &str) {
        self.rule.push(Part::Refuse(what.to_owned()));
    }

    fn change(&mut self, what: &str) {
        self.rule.push(Part::Change(what.to_owned()));
    }

    /// Records a load that kpx does not evaluate. The rule ends if the packet has nothing to load.
    fn unknown_load(&mut self) {
        self.registers.forget();
        self.maybe();
    }

    fn payload(&mut self, data: &Attrs) {
        let Some(to) = data.u32(NFTA_PAYLOAD_DREG) else {
            return self.change("rewrite the packet");
        };
        let is_header = data.u32(NFTA_PAYLOAD_BASE) == Some(NFT_PAYLOAD_NETWORK_HEADER);
        match data
            .u32(NFTA_PAYLOAD_OFFSET)
            .zip(data.u32(NFTA_PAYLOAD_LEN))
            .filter(|_| is_header)
        {
            Some((offset, len)) => {
                self.registers
                    .load(to, Field::Header(offset as usize), len as usize)
            }
            None => self.unknown_load(),
        }
    }

    fn meta(&mut self, data: &Attrs) {
        let key = data.u32(NFTA_META_KEY);
        let Some(to) = data.u32(NFTA_META_DREG) else {
            return match key {
                Some(NFT_META_MARK) => {
                    let change = data
                        .u32(NFTA_META_SREG)
                        .and_then(|from| self.registers.mark(from));
                    self.rule.push(Part::SetMark(change));
                    // Registers may hold the previous mark.
                    self.registers.forget();
                }
                Some(NFT_META_NFTRACE) => self.change("trace the packet"),
                _ => self.change("apply meta"),
            };
        };
        match key {
            Some(NFT_META_MARK) => self.registers.load(to, Field::Mark, 4),
            Some(NFT_META_NFPROTO) => self.registers.load(to, Field::NfProto, 1),
            Some(NFT_META_PROTOCOL) => self.registers.load(to, Field::Protocol, 2),
            Some(NFT_META_L4PROTO) => self.registers.load(to, Field::L4Proto, 1),
            Some(NFT_META_IIFNAME) => self.registers.load(to, Field::InName, IFNAMSIZ),
            Some(NFT_META_OIFNAME) => self.registers.load(to, Field::OutName, IFNAMSIZ),
            _ => self.unknown_load(),
        }
    }

    fn fib(&mut self, data: &Attrs) {
        let is_kind = data.u32(NFTA_FIB_RESULT) == Some(NFT_FIB_RESULT_ADDRTYPE);
        let of_destination = data.u32(NFTA_FIB_FLAGS) == Some(NFTA_FIB_F_DADDR);
        match data
            .u32(NFTA_FIB_DREG)
            .filter(|_| is_kind && of_destination)
        {
            Some(to) => self
                .registers
                .load(to, Field::DestinationKind, size_of_val(&RTN_LOCAL)),
            None => self.unknown_load(),
        }
    }

    fn bitwise(&mut self, data: &Attrs) -> Result<()> {
        let registers = data.u32(NFTA_BITWISE_SREG).zip(data.u32(NFTA_BITWISE_DREG));
        let mask = data.inside(NFTA_BITWISE_MASK)?;
        let flip = data.inside(NFTA_BITWISE_XOR)?;
        let bits = mask.get(NFTA_DATA_VALUE).zip(flip.get(NFTA_DATA_VALUE));
        let is_mask = data
            .u32(NFTA_BITWISE_OP)
            .is_none_or(|op| op == NFT_BITWISE_MASK_XOR);
        match registers.zip(bits).filter(|_| is_mask) {
            Some(((from, to), (mask, flip))) => self.registers.mask([from, to], mask, flip),
            None => self.registers.forget(),
        }
        Ok(())
    }

    fn cmp(&mut self, data: &Attrs) -> Result<()> {
        let equal = match data.u32(NFTA_CMP_OP) {
            Some(NFT_CMP_EQ) => Some(true),
            Some(NFT_CMP_NEQ) => Some(false),
            _ => None,
        };
        let value = data.inside(NFTA_CMP_DATA)?.get(NFTA_DATA_VALUE);
        let asked = data.u32(NFTA_CMP_SREG).zip(value.zip(equal));
        let condition =
            asked.and_then(|(from, (value, equal))| self.registers.compare(from, value, equal));
        self.rule
            .push(condition.map_or(Part::Maybe, Part::Condition));
        Ok(())
    }

    fn immediate(&mut self, data: &Attrs) -> Result<()> {
        if data.u32(NFTA_IMMEDIATE_DREG) != Some(NFT_REG_VERDICT) {
            self.registers.forget();
            return Ok(());
        }
        let verdict = data
            .inside(NFTA_IMMEDIATE_DATA)?
            .inside(NFTA_DATA_VERDICT)?;
        let chain = verdict.text(NFTA_VERDICT_CHAIN).map(str::to_owned);
        let verdict = match (verdict.u32(NFTA_VERDICT_CODE).map(u32::cast_signed), chain) {
            (Some(NFT_CONTINUE), _) => return Ok(()),
            (Some(NF_ACCEPT), _) => Verdict::Accept,
            (Some(NFT_BREAK), _) => Verdict::Break,
            (Some(NFT_RETURN), _) => Verdict::Return,
            (Some(NFT_JUMP), Some(chain)) => Verdict::Jump(chain),
            (Some(NFT_GOTO), Some(chain)) => Verdict::Goto(chain),
            (code, _) => {
                self.refuse(if code == Some(NF_DROP) {
                    "drop the packet"
                } else {
                    "hold back the packet"
                });
                return Ok(());
            }
        };
        self.rule.push(Part::Verdict(verdict));
        Ok(())
    }
}
