//! SPDY/3.1 frames, as far as `kubectl port-forward` uses them: streams with headers and data, and
//! pings.

use anyhow::{Context, Result, bail, ensure};
use bytes::{Buf, Bytes, BytesMut};
use flate2::{Decompress, FlushDecompress};

/// The length of a frame's header.
const HEAD: usize = 8;
/// The bit of a control frame, above its version.
const CONTROL: u32 = 1 << 31;
const VERSION: u32 = 3;
const SYN_STREAM: u32 = 1;
const SYN_REPLY: u32 = 2;
const RST_STREAM: u32 = 3;
const PING: u32 = 6;
const FIN: u8 = 1;
/// The bits of a stream id.
const STREAM: u32 = CONTROL - 1;

/// The words of the initial dictionary, each preceded by its length, ...
const WORDS: &str = "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow \
    authorization cache-control connection content-base content-encoding content-language content-length content-location content-md5 \
    content-range content-type date etag expect expires from host if-match if-modified-since if-none-match if-range \
    if-unmodified-since last-modified location max-forwards pragma proxy-authenticate proxy-authorization range referer retry-after \
    server te trailer transfer-encoding upgrade user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 \
    url public set-cookie keep-alive origin";
/// ... and the text that follows them.
const TEXT: &str = "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritative \
    Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 Internal Server \
    Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, \
    Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,\
    publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";
/// The start of a client's first headers: a zlib header with the checksum of that dictionary.
const DICTIONARY_ID: [u8; 4] = [0xe3, 0xc6, 0xa7, 0xc2];
/// The start of the first sent headers: a zlib header without a dictionary.
const ZLIB: [u8; 2] = [0x78, 0x01];
/// An empty list of headers and a zlib flush, both uncompressed.
const NO_HEADERS: [u8; 14] = [0, 4, 0, 0xfb, 0xff, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Open {
        stream: u32,
        headers: Vec<(String, String)>,
    },
    Data {
        stream: u32,
        data: Bytes,
        is_last: bool,
    },
    Reset {
        stream: u32,
    },
    Ping {
        id: u32,
    },
    Other,
}

/// Splits a connection's bytes into frames.
pub(super) struct Reader {
    bytes: BytesMut,
    /// Inflates the headers of all frames, which share a zlib stream.
    headers: Decompress,
    has_dictionary: bool,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self {
            bytes: BytesMut::new(),
            headers: Decompress::new(false),
            has_dictionary: false,
        }
    }

    pub(super) fn take(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next frame once it is complete.
    pub(super) fn next(&mut self) -> Result<Option<Frame>> {
        let Some(head) = self.bytes.first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let [a, b, c, d, flags, length @ ..] = *head;
        let kind = u32::from_be_bytes([a, b, c, d]);
        let is_last = flags & FIN != 0;
        let length = usize::try_from(u32::from_be_bytes([0, length[0], length[1], length[2]]))?;
        if self.bytes.len() < HEAD + length {
            return Ok(None);
        }
        self.bytes.advance(HEAD);
        let mut contents = self.bytes.split_to(length).freeze();
        if kind & CONTROL == 0 {
            return Ok(Some(Frame::Data {
                stream: kind,
                data: contents,
                is_last,
            }));
        }
        ensure!(
            (kind & STREAM) >> 16 == VERSION,
            "a frame of another version: {kind:#x}"
        );
        Ok(Some(match kind & 0xffff {
            SYN_STREAM => {
                let stream = number(&mut contents)? & STREAM;
                // Skip the associated stream and the priority.
                ensure!(contents.len() >= 6, "a short frame");
                contents.advance(6);
                Frame::Open {
                    stream,
                    headers: self.headers(&contents).context("read headers")?,
                }
            }
            RST_STREAM => Frame::Reset {
                stream: number(&mut contents)? & STREAM,
            },
            PING => Frame::Ping {
                id: number(&mut contents)?,
            },
            _ => Frame::Other,
        }))
    }

    fn headers(&mut self, mut block: &[u8]) -> Result<Vec<(String, String)>> {
        if !self.has_dictionary {
            let (start, rest) = block
                .split_first_chunk::<6>()
                .context("the headers are short")?;
            ensure!(
                start[2..] == DICTIONARY_ID,
                "the headers are compressed with another dictionary"
            );
            // The dictionary acts as earlier output for later bytes.
            inflate(&mut self.headers, &stored(&dictionary())?)?;
            self.has_dictionary = true;
            block = rest;
        }
        let mut block = Bytes::from(inflate(&mut self.headers, block)?);
        let count = number(&mut block)?;
        (0..count)
            .map(|_| Ok((text(&mut block)?, text(&mut block)?)))
            .collect()
    }
}

/// Returns the frame that accepts a stream. The connection's first such frame starts the zlib
/// stream.
pub(super) fn accept(stream: u32, is_first: bool) -> Vec<u8> {
    let start: &[u8] = if is_first { &ZLIB } else { &[] };
    frame(
        CONTROL | VERSION << 16 | SYN_REPLY,
        false,
        &[&stream.to_be_bytes(), start, &NO_HEADERS],
    )
}

/// Returns a data frame of a stream, at most 16 MiB.
pub(super) fn data(stream: u32, data: &[u8], is_last: bool) -> Vec<u8> {
    frame(stream, is_last, &[data])
}

/// Returns the answer to a ping, which equals the ping.
pub(super) fn ping(id: u32) -> Vec<u8> {
    frame(CONTROL | VERSION << 16 | PING, false, &[&id.to_be_bytes()])
}

fn frame(kind: u32, is_last: bool, contents: &[&[u8]]) -> Vec<u8> {
    let length: usize = contents.iter().map(|part| part.len()).sum();
    let mut frame = Vec::with_capacity(HEAD + length);
    frame.extend(kind.to_be_bytes());
    frame.push(if is_last { FIN } else { 0 });
    frame.extend(&length.to_be_bytes()[size_of::<usize>() - 3..]);
    contents.iter().for_each(|part| frame.extend(*part));
    frame
}

fn number(bytes: &mut Bytes) -> Result<u32> {
    bytes.try_get_u32().context("a short frame")
}

fn text(bytes: &mut Bytes) -> Result<String> {
    let length = usize::try_from(number(bytes)?)?;
    ensure!(length <= bytes.len(), "a header is longer than its frame");
    Ok(String::from_utf8(bytes.split_to(length).to_vec())?)
}

fn dictionary() -> Vec<u8> {
    let word = |word: &str| {
        let length = u32::try_from(word.len()).unwrap_or(u32::MAX).to_be_bytes();
        length
            .into_iter()
            .chain(word.replace('_', " ").into_bytes())
            .collect::<Vec<_>>()
    };
    WORDS
        .split(' ')
        .flat_map(word)
        .chain(TEXT.bytes())
        .collect()
}

/// Returns an uncompressed deflate block with these bytes.
fn stored(bytes: &[u8]) -> Result<Vec<u8>> {
    let length = u16::try_from(bytes.len())?;
    Ok([
        &[0],
        &length.to_le_bytes()[..],
        &(!length).to_le_bytes(),
        bytes,
    ]
    .concat())
}

fn inflate(stream: &mut Decompress, mut input: &[u8]) -> Result<Vec<u8>> {
    let mut output = Vec::new();
    loop {
        output.reserve(4_096);
        let read = stream.total_in();
        let written = output.len();
        stream.decompress_vec(input, &mut output, FlushDecompress::Sync)?;
        let read = usize::try_from(stream.total_in() - read)?;
        input = &input[read..];
        match (input.is_empty(), output.len() < output.capacity()) {
            (true, true) => return Ok(output),
            (false, true) if read == 0 && output.len() == written => {
                bail!("the compressed bytes cannot be read")
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Headers compressed by zlib with the SPDY/3.1 dictionary, flushed after each list.
    const FIRST: &[u8] =
        b"\x78\xf9\xe3\xc6\xa7\xc2\x02\x25\x3a\x70\x3a\x2b\x29\x4a\x4d\xcc\x85\x16\x25\xac\xa9\xa0\x80\x86\x14\xcb\x45\
        \xe0\x1c\x60\x61\x60\x61\x00\xa4\x39\x8b\x20\xd1\x98\x09\x4a\xde\x8c\x06\x00\x00\x00\x00\xff\xff";
    const SECOND: &[u8] = b"\xc2\xaa\x19\x54\x0e\x25\x12\xd6\x0b\x00\x00\x00\xff\xff";

    fn open(stream: u32, headers: &[u8]) -> Vec<u8> {
        frame(
            CONTROL | VERSION << 16 | SYN_STREAM,
            false,
            &[&stream.to_be_bytes(), &[0; 6], headers],
        )
    }

    fn headers(kind: &str) -> Vec<(String, String)> {
        [("streamtype", kind), ("port", "8080"), ("requestid", "0")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    fn read(bytes: &[u8], piece: usize) -> Vec<Frame> {
        let mut reader = Reader::new();
        let mut frames = Vec::new();
        for piece in bytes.chunks(piece) {
            reader.take(piece);
            while let Some(frame) = reader.next().unwrap() {
                frames.push(frame);
            }
        }
        frames
    }

    #[test]
    fn frames_are_read_from_pieces_of_any_size() {
        let bytes = [
            open(1, FIRST),
            open(3, SECOND),
            data(3, b"hello", false),
            ping(5),
            data(3, b"", true),
        ]
        .concat();
        let data = |data: &'static [u8], is_last| Frame::Data {
            stream: 3,
            data: Bytes::from_static(data),
            is_last,
        };
        let expected = [
            Frame::Open {
                stream: 1,
                headers: headers("error"),
            },
            Frame::Open {
                stream: 3,
                headers: headers("data"),
            },
            data(b"hello", false),
            Frame::Ping { id: 5 },
            data(b"", true),
        ];
        for piece in [1, 7, bytes.len()] {
            assert_eq!(read(&bytes, piece), expected, "{piece}");
        }
    }

    #[test]
    fn headers_of_another_dictionary_are_refused() {
        let mut reader = Reader::new();
        let other = [&[0x78, 0xf9, 1, 2, 3, 4], &FIRST[6..]].concat();
        reader.take(&open(1, &other));
        assert!(reader.next().is_err());
    }

    #[test]
    fn answers_hold_lists_of_no_headers() {
        let [first, second] = [true, false].map(|is_first| accept(9, is_first));
        assert_eq!(first[..8], [0x80, 3, 0, 2, 0, 0, 0, 20]);
        let mut zlib = Decompress::new(true);
        for headers in [&first[12..], &second[12..]] {
            assert_eq!(inflate(&mut zlib, headers).unwrap(), [0; 4]);
        }
    }
}
