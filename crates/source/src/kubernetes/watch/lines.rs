//! Splits an API server's answer into lines of one event each.

use std::io;

use futures::{AsyncBufRead, Stream, TryStreamExt as _};
use tokio_util::codec::{FramedRead, LinesCodec, LinesCodecError};
use tokio_util::compat::FuturesAsyncReadCompatExt as _;

/// The maximum size of a line in bytes. etcd refuses requests of more than 1.5 MiB, and JSON
/// escapes grow a byte to at most six.
const LONGEST: usize = 16 << 20;

/// Returns the lines without line ends. A longer line is an error, so memory is bounded.
pub(super) fn lines(answer: impl AsyncBufRead) -> impl Stream<Item = io::Result<String>> {
    lines_up_to(answer, LONGEST)
}

fn lines_up_to(
    answer: impl AsyncBufRead,
    longest: usize,
) -> impl Stream<Item = io::Result<String>> {
    let lines = FramedRead::new(answer.compat(), LinesCodec::new_with_max_length(longest));
    lines.map_err(move |error| match error {
        LinesCodecError::MaxLineLengthExceeded => io::Error::new(
            io::ErrorKind::InvalidData,
            format!("an event of more than {longest} bytes"),
        ),
        LinesCodecError::Io(error) => error,
    })
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::io::{AsyncReadExt as _, BufReader, Cursor, repeat};

    use super::*;

    #[tokio::test]
    async fn lines_come_one_by_one() {
        let answer = Cursor::new("{\"a\":1}\n\n{\"b\":2}\n{\"c\"");
        let lines: Vec<_> = lines(answer).try_collect().await.unwrap();
        assert_eq!(lines, ["{\"a\":1}", "", "{\"b\":2}", "{\"c\""]);
    }

    #[tokio::test]
    async fn endless_line_ends_the_answer() {
        let answer = Cursor::new("12345678\n").chain(BufReader::new(repeat(b'x')));
        let mut lines = pin!(lines_up_to(answer, 8));
        assert_eq!(lines.try_next().await.unwrap().as_deref(), Some("12345678"));
        assert_eq!(
            lines.try_next().await.unwrap_err().to_string(),
            "an event of more than 8 bytes"
        );
    }
}
