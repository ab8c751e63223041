//! Ends the connection of a client that does not read.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream whose writes fail if the peer reads no data for some time.
pub(super) struct Patient<S> {
    stream: S,
    patience: Option<Duration>,
    /// The deadline of the pending write; `None` if no write is pending.
    end: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    /// Wraps a stream. If `patience` is `None`, writes may wait for ever.
    pub(super) const fn new(stream: S, patience: Option<Duration>) -> Self {
        Self {
            stream,
            patience,
            end: None,
        }
    }

    /// Returns the result of a write, or an error if writes have waited too long.
    fn bounded<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let (Poll::Pending, Some(patience)) = (&written, self.patience) else {
            self.end = None;
            return written;
        };
        ready!(
            self.end
                .get_or_insert_with(|| Box::pin(sleep(patience)))
                .as_mut()
                .poll(context)
        );
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client does not read",
        )))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.bounded(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        // A socket has nothing to flush, and a flush would clear the pending write's limit.
        if flushed.is_pending() {
            self.bounded(context, flushed)
        } else {
            flushed
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.bounded(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn client_that_does_not_read_loses_its_connection() {
        let (near, _far) = duplex(64);
        let mut stream = Patient::new(near, Some(PATIENCE));
        let since = Instant::now();
        let error = stream.write_all(&[0; 1_000]).await.unwrap_err();
        assert_eq!(
            (error.kind(), since.elapsed().as_secs()),
            (io::ErrorKind::TimedOut, 30)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn slow_client_gets_all_and_one_of_the_host_may_pause() {
        for (patience, pause) in [(Some(PATIENCE), 29), (None, 10_000)] {
            let (near, mut far) = duplex(64);
            let mut stream = Patient::new(near, patience);
            let read = async {
                for _ in 0..5 {
                    sleep(Duration::from_secs(pause)).await;
                    far.read_exact(&mut [0; 64]).await.unwrap();
                }
            };
            let (written, ()) = tokio::join!(stream.write_all(&[0; 320]), read);
            written.unwrap();
        }
    }
}
