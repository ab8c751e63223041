//! Reads requests and writes responses (RFC 1035; EDNS, RFC 6891).

use domain::base::iana::{Class, Opcode, OptRcode, Rcode, Rtype};
use domain::base::message_builder::{AnswerBuilder, PushError, StaticCompressor, StreamTarget};
use domain::base::name::ToName;
use domain::base::{Message, MessageBuilder};
use rand::seq::SliceRandom;

use crate::cluster_names::{Cluster, Known, Wanted};
use crate::records::{Answer, Data, TTL, answer, soa};
use crate::zone::{OwnedName, Zone};

/// The maximum response in a datagram, in bytes, which usual paths do not fragment (DNS flag day
/// 2020).
const DATAGRAM: u16 = 1_232;
/// The maximum response to a client without EDNS, in bytes (RFC 1035 §4.2.1).
const SMALL: u16 = 512;
/// The size of the OPT record with this server's maximum request, in bytes.
const OPT: usize = 11;
/// The maximum length of a CNAME chain.
const CHAIN: usize = 8;

type Target = StaticCompressor<StreamTarget<Vec<u8>>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Datagram,
    Stream,
}

/// Returns the response in the transport's form: on a stream, it begins with its length. `None` if
/// the message is not a request.
pub async fn reply(
    zone: &Zone,
    cluster: &impl Cluster,
    request: &[u8],
    transport: Transport,
) -> Option<Vec<u8>> {
    let request = Message::from_octets(request)
        .ok()
        .filter(|request| !request.header().qr())?;
    let outcome = match question(&request) {
        Ok((name, rtype)) => resolve(zone, cluster, &name, rtype).await,
        Err(code) => Outcome::error(code),
    };
    let edns = request.opt();
    let outcome = match &edns {
        Some(opt) if opt.version() != 0 => Outcome::error(OptRcode::BADVERS),
        _ => outcome,
    };
    let limit = match (transport, &edns) {
        (Transport::Stream, _) => u16::MAX,
        (Transport::Datagram, Some(opt)) => opt.udp_payload_size().clamp(SMALL, DATAGRAM),
        (Transport::Datagram, None) => SMALL,
    };
    let target = write(&request, &outcome, limit, edns.is_some()).ok()?;
    Some(match transport {
        Transport::Datagram => target.as_dgram_slice().to_vec(),
        Transport::Stream => target.as_stream_slice().to_vec(),
    })
}

/// Returns the only question of a request, or the error code.
fn question(request: &Message<&[u8]>) -> Result<(OwnedName, Rtype), OptRcode> {
    if request.header().opcode() != Opcode::QUERY {
        return Err(OptRcode::NOTIMP);
    }
    let question = request.sole_question().map_err(|_| OptRcode::FORMERR)?;
    if question.qclass() != Class::IN || matches!(question.qtype(), Rtype::AXFR | Rtype::IXFR) {
        return Err(OptRcode::REFUSED);
    }
    Ok((question.qname().to_name(), question.qtype()))
}

/// The content of a response.
struct Outcome {
    code: OptRcode,
    answers: Vec<(OwnedName, Data)>,
    authority: Option<(OwnedName, Data)>,
    additional: Vec<(OwnedName, Data)>,
}

impl Outcome {
    fn error(code: OptRcode) -> Self {
        Self {
            code,
            answers: Vec::new(),
            authority: None,
            additional: Vec::new(),
        }
    }
}

/// Collects the records of a name and of its CNAME targets.
async fn resolve(zone: &Zone, cluster: &impl Cluster, name: &OwnedName, rtype: Rtype) -> Outcome {
    let mut outcome = Outcome::error(OptRcode::NOERROR);
    let mut name = name.clone();
    for _ in 0..CHAIN {
        let Some(subject) = zone.subject(&name) else {
            // The client queries another server for a CNAME target outside the domain.
            return if outcome.answers.is_empty() {
                Outcome::error(OptRcode::REFUSED)
            } else {
                outcome
            };
        };
        let known = match Wanted::of(&subject) {
            Some(wanted) => cluster.known(wanted).await,
            None => Some(Known::default()),
        };
        let Some(known) = known else {
            return Outcome::error(OptRcode::SERVFAIL);
        };
        match answer(zone, &subject, rtype, &known) {
            Answer::Records(mut records, additional) => {
                // Clients use the first address.
                records.shuffle(&mut rand::rng());
                let alias = records.iter().find_map(|record| match record {
                    Data::Cname(alias) if rtype != Rtype::CNAME => Some(alias.cname().clone()),
                    _ => None,
                });
                outcome
                    .answers
                    .extend(records.into_iter().map(|record| (name.clone(), record)));
                outcome.additional = additional;
                let Some(alias) = alias else { return outcome };
                if outcome.answers.iter().any(|(known, _)| *known == alias) {
                    return Outcome::error(OptRcode::SERVFAIL);
                }
                name = alias;
            }
            absent => {
                if absent == Answer::NoName {
                    outcome.code = OptRcode::NXDOMAIN;
                }
                outcome.authority = soa(zone).map(|soa| (zone.name().clone(), soa));
                return outcome;
            }
        }
    }
    outcome
}

/// Writes the response in at most `limit` bytes. Sets TC if it is truncated.
fn write(
    request: &Message<&[u8]>,
    outcome: &Outcome,
    limit: u16,
    has_edns: bool,
) -> Result<StreamTarget<Vec<u8>>, PushError> {
    let rcode =
        Rcode::checked_from_int(outcome.code.to_int() as u8 & 0xf).unwrap_or(Rcode::SERVFAIL);
    let mut builder = MessageBuilder::from_target(StaticCompressor::new(StreamTarget::new_vec()))
        .map_err(|_| PushError::ShortBuf)?;
    builder.set_push_limit(usize::from(limit) - if has_edns { OPT } else { 0 });
    let mut answers: AnswerBuilder<Target> = builder.start_error(request, rcode);
    answers
        .header_mut()
        .set_aa(outcome.code == OptRcode::NOERROR || outcome.code == OptRcode::NXDOMAIN);
    let is_whole = outcome
        .answers
        .iter()
        .all(|(name, data)| answers.push((name, TTL, data)).is_ok());
    // A stream has no larger transport to retry with.
    answers.header_mut().set_tc(!is_whole && limit != u16::MAX);
    let mut authority = answers.authority();
    if let Some((name, data)) = &outcome.authority {
        authority.push((name, TTL, data))?;
    }
    let mut additional = authority.additional();
    // Clients query the omitted addresses themselves.
    let _ = outcome
        .additional
        .iter()
        .take_while(|(name, data)| additional.push((name, TTL, data)).is_ok())
        .count();
    if has_edns {
        additional.as_builder_mut().clear_push_limit();
        additional.opt(|opt| {
            opt.set_udp_payload_size(DATAGRAM);
            opt.set_rcode(outcome.code);
            Ok(())
        })?;
    }
    Ok(additional.finish().into_target())
}

#[cfg(test)]
mod tests;
