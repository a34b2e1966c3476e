//! Connection of a client: its bytes, its peer, and its slot in the connection limits.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use crate::{
    auth::{Caller, Place},
    tls::Peer,
};

/// A connection with its place, which is free again when it is dropped.
#[derive(Debug)]
pub struct Connection<S> {
    stream: S,
    caller: Arc<Caller>,
    /// Timeout of the first bytes of the client. HTTP/2 itself has no such timeout.
    silence: Option<Pin<Box<Sleep>>>,
    /// Until its certificate is not good any more.
    gone: Option<(Arc<Peer>, Pin<Box<WaitForCancellationFutureOwned>>)>,
    _place: Place,
}

impl<S> Connection<S> {
    /// It fails when its client says nothing for `silence`.
    pub fn new(stream: S, caller: Caller, place: Place, silence: Duration) -> Self {
        Self {
            stream,
            caller: Arc::new(caller),
            silence: Some(Box::pin(sleep(silence))),
            gone: None,
            _place: place,
        }
    }

    /// It also fails when the certificate of its client is not good any more.
    pub fn until_gone(self, peer: Arc<Peer>) -> Self {
        let gone = Box::pin(peer.gone().clone().cancelled_owned());
        Self {
            gone: Some((peer, gone)),
            ..self
        }
    }
}

impl<S> Connected for Connection<S> {
    type ConnectInfo = Arc<Caller>;

    fn connect_info(&self) -> Self::ConnectInfo {
        Arc::clone(&self.caller)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some((_, gone)) = &mut self.gone
            && gone.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_ready() {
            self.silence = None;
        } else if let Some(silence) = &mut self.silence
            && silence.as_mut().poll(context).is_ready()
        {
            self.silence = None;
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
