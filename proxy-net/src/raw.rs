//! A netlink message as bytes, for the families that no crate has messages for.

use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable};

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub(crate) kind: u16,
    pub(crate) bytes: Vec<u8>,
}

/// Builds a request with these flags of the netlink header.
pub(crate) fn request(kind: u16, flags: u16, bytes: Vec<u8>) -> NetlinkMessage<Message> {
    let mut message =
        NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::InnerMessage(Message { kind, bytes }));
    message.header.flags = flags;
    message.finalize();
    message
}

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.bytes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer[..self.bytes.len()].copy_from_slice(&self.bytes);
    }
}

impl NetlinkDeserializable for Message {
    type Error = std::convert::Infallible;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, Self::Error> {
        Ok(Self { kind: header.message_type, bytes: payload.to_vec() })
    }
}
