//! Netlink messages as bytes, for netlink families without a crate, and a socket for them.

use std::io;

use anyhow::{Result, bail};
use futures::StreamExt;
use netlink_packet_core::{
    NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use rtnetlink::proto::{Connection, ConnectionHandle, new_connection};

use crate::netlink::kernel;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub(crate) kind: u16,
    pub(crate) bytes: Vec<u8>,
}

/// A socket for requests, which may stay open.
pub(crate) struct Asker {
    connection: Connection<Message>,
    handle: ConnectionHandle<Message>,
}

impl Asker {
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        let (mut connection, handle, _) = new_connection(protocol)?;
        // The message that ends a dump carries its error.
        connection.set_forward_done(true);
        Ok(Self { connection, handle })
    }

    pub(crate) async fn ask<T, E: Into<anyhow::Error>>(
        &mut self,
        work: impl AsyncFnOnce(&ConnectionHandle<Message>) -> std::result::Result<T, E>,
    ) -> Result<T> {
        tokio::select! {
            answer = work(&self.handle) => answer.map_err(Into::into),
            () = &mut self.connection => bail!("the netlink socket has failed"),
        }
    }
}

/// Builds a request with these flags of the netlink header.
pub(crate) fn request(kind: u16, flags: u16, bytes: Vec<u8>) -> NetlinkMessage<Message> {
    let mut message = NetlinkMessage::new(
        NetlinkHeader::default(),
        NetlinkPayload::InnerMessage(Message { kind, bytes }),
    );
    message.header.flags = flags;
    message.finalize();
    message
}

/// Sends a request. Returns the first message of the answer, or the kernel's error.
pub(crate) async fn first(
    handle: &ConnectionHandle<Message>,
    request: NetlinkMessage<Message>,
) -> io::Result<Message> {
    let mut answers = handle
        .request(request, kernel())
        .map_err(io::Error::other)?;
    while let Some(answer) = answers.next().await {
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => return Ok(message),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            _ => {}
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// The length of an attribute's header, and the flag of a nested attribute.
const ATTRIBUTE_HEAD_LEN: usize = 4;
const NLA_F_NESTED: u16 = 1 << 15;

pub(crate) fn nested(kind: u16, inside: &[u8]) -> Vec<u8> {
    attribute(kind | NLA_F_NESTED, inside)
}

/// Builds an attribute: length, type, value, padding to four bytes.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = (ATTRIBUTE_HEAD_LEN + value.len()) as u16;
    let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
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
        Ok(Self {
            kind: header.message_type,
            bytes: payload.to_vec(),
        })
    }
}
