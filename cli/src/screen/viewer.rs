//! `vnc`: a viewer, or a place that viewers can connect to. A viewer whose screen ended, as with the daemon or when its VM is restored, is started again
//! when there is one.

use std::{
    fs::DirBuilder,
    io,
    net::SocketAddr,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, UnixListener},
    process::{Child, Command},
    signal::ctrl_c,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use vmmd_api::v1::{CreateVncTicketRequest, VncRequest, VncTicketKind, vnc_request::Message};

use super::{
    password,
    rfb::{Rfb, Stream},
};
use crate::{
    args::verbs::Vnc,
    client::{Client, about_vm},
    failure::{Code, Failure, Result},
};

/// Bytes of one message, at most 64 KiB by the API.
const CHUNK: usize = 32 << 10;
/// Time limit for the daemon to process a viewer's last input.
const LAST: Duration = Duration::from_secs(10);
/// How long a viewer may take to show its password, which people type.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// Time limit for the return of a screen that ended.
const BACK: Duration = Duration::from_secs(60);
/// From one look for it to the next.
const LOOK: Duration = Duration::from_secs(1);
/// TigerVNC's, which takes the path of a socket.
const VIEWER: &str = "vncviewer";

/// Starts a viewer and ends with it, serves viewers at `--listen` until ^C, or prints a way in for `--web` and `--password`.
pub async fn run(client: &Client, args: &Vnc) -> Result<()> {
    if args.web || (args.password && args.listen.is_none()) {
        return ticket(client, args).await;
    }
    // Whether there is a screen is known before a viewer is started.
    drop(Stream::open(client, &args.name, args.view_only).await?);
    match args.listen {
        Some(address) => listen(client, args, address).await,
        None => view(client, args).await,
    }
}

/// Prints the address of a page, or address and password for a viewer.
async fn ticket(client: &Client, args: &Vnc) -> Result<()> {
    let kind = if args.web {
        VncTicketKind::Web
    } else {
        VncTicketKind::Password
    };
    let request = CreateVncTicketRequest {
        name: args.name.clone(),
        view_only: args.view_only,
        kind: kind.into(),
    };
    let answer = client.vms.clone().create_vnc_ticket(request).await;
    let ticket = answer
        .map_err(|status| about_vm(status.into(), &args.name))?
        .into_inner();
    if args.web {
        println!("{}", ticket.url);
    } else {
        println!("{} {}", ticket.address, ticket.password);
    }
    eprintln!("On the node itself, good once and for a minute.");
    Ok(())
}

async fn listen(client: &Client, args: &Vnc, address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(|error| failed(&format!("listening on {address}"), &error))?;
    let address = listener
        .local_addr()
        .map_err(|error| failed("listening", &error))?;
    let password = args.password.then(|| Arc::<str>::from(password::new()));
    match &password {
        Some(password) => println!("{address} {password}"),
        None => println!("{address}"),
    }
    eprintln!(
        "VNC viewers reach the screen of vm/{} at {address}{}. ^C ends.",
        args.name,
        if password.is_some() {
            " with this password"
        } else {
            ""
        }
    );
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (socket, _) = accepted.map_err(|error| failed("accepting a viewer", &error))?;
                serve(client, args, password.clone(), socket.into_split());
            }
            _ = ctrl_c() => return Ok(()),
        }
    }
}

async fn view(client: &Client, args: &Vnc) -> Result<()> {
    let folder = Folder::new().map_err(|error| failed("making a folder for the viewer's socket", &error))?;
    let path = folder.0.join("vnc.sock");
    let listener = UnixListener::bind(&path).map_err(|error| failed("making the viewer's socket", &error))?;
    loop {
        let mut viewer = start(&path, args)?;
        let mut screen = None;
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let (socket, _) = accepted.map_err(|error| failed("accepting the viewer", &error))?;
                    screen = Some(serve(client, args, None, socket.into_split()));
                }
                ended = viewer.wait() => return outcome(ended),
                End::Screen = end_of(&mut screen) => break,
                _ = ctrl_c() => return Ok(()),
            }
        }
        eprintln!(
            "The screen of vm/{} has ended; continuing when it is back. ^C ends.",
            args.name
        );
        viewer
            .kill()
            .await
            .map_err(|error| failed(&format!("ending {VIEWER}"), &error))?;
        tokio::select! {
            back = back(client, args) => back?,
            _ = ctrl_c() => return Ok(()),
        }
    }
}

fn start(socket: &Path, args: &Vnc) -> Result<Child> {
    let viewer = Command::new(VIEWER)
        // Other viewers stay connected.
        .arg("-Shared")
        .arg(socket)
        .kill_on_drop(true)
        .spawn();
    viewer.map_err(|error| {
        let message = format!("starting {VIEWER}: {error}");
        Failure::new(Code::Other, message).hint(format!(
            "install TigerVNC's viewer, or `vmmctl vnc {} --listen 127.0.0.1:5900` and any other viewer",
            args.name
        ))
    })
}

/// Which side of a viewer's connection ended first.
enum End {
    Viewer,
    Screen,
}

/// How the connection ends, if there is one.
async fn end_of(connection: &mut Option<JoinHandle<End>>) -> End {
    match connection {
        Some(serving) => {
            let end = serving.await;
            *connection = None;
            end.unwrap_or(End::Screen)
        }
        None => std::future::pending().await,
    }
}

/// Waits until the VM has a screen, not for one that is gone for good.
async fn back(client: &Client, args: &Vnc) -> Result<()> {
    let begun = Instant::now();
    loop {
        sleep(LOOK).await;
        match Stream::open(client, &args.name, args.view_only).await {
            // It is the viewer's to open.
            Ok(_) => return Ok(()),
            Err(failure)
                if matches!(failure.code, Code::Unavailable | Code::Precondition)
                    && begun.elapsed() < BACK => {}
            Err(failure) => return Err(failure),
        }
    }
}

fn outcome(ended: io::Result<ExitStatus>) -> Result<()> {
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::new(Code::Other, format!("{VIEWER} ended with {status}"))),
        Err(error) => Err(failed(&format!("waiting for {VIEWER}"), &error)),
    }
}

/// Passes bytes on between a viewer, which shows the password if there is one, and the VM's screen, in a task of its own.
fn serve<R, W>(
    client: &Client,
    args: &Vnc,
    password: Option<Arc<str>>,
    (mut reader, mut writer): (R, W),
) -> JoinHandle<End>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (client, name, view_only) = (client.clone(), args.name.clone(), args.view_only);
    tokio::spawn(async move {
        if let Some(password) = &password {
            let showing = password::shown(&mut reader, &mut writer, password);
            if !matches!(timeout(HANDSHAKE, showing).await, Ok(Ok(true))) {
                return End::Viewer;
            }
        }
        let opened = async {
            let stream = Stream::open(&client, &name, view_only).await?;
            match password {
                Some(_) => Rfb::greeted(stream).await,
                None => Ok((stream, Vec::new())),
            }
        };
        let (stream, first) = match opened.await {
            Ok(opened) => opened,
            Err(failure) => {
                eprintln!("vmmctl: {failure}");
                return End::Screen;
            }
        };
        let admitted = async {
            if password.is_some() {
                password::admit(&mut writer).await?;
            }
            writer.write_all(&first).await
        };
        match admitted.await {
            Ok(()) => pass(stream, reader, writer).await,
            Err(_) => End::Viewer,
        }
    })
}

async fn pass(
    stream: Stream,
    mut reader: impl AsyncRead + Unpin,
    mut writer: impl AsyncWrite + Unpin,
) -> End {
    let Stream {
        requests,
        mut responses,
    } = stream;
    // The requests end with it.
    let to_screen = async move {
        let mut buffer = vec![0; CHUNK];
        while let Ok(count) = reader.read(&mut buffer).await {
            let data = buffer.get(..count).unwrap_or_default().to_vec();
            let request = VncRequest {
                message: Some(Message::Data(data)),
            };
            if count == 0 || requests.send(request).await.is_err() {
                return;
            }
        }
    };
    let to_viewer = async move {
        let mut gone = false;
        // Continues after the viewer has left: its last input is still in transit.
        while let Ok(Some(response)) = responses.message().await {
            gone = gone || writer.write_all(&response.data).await.is_err();
        }
    };
    tokio::pin!(to_viewer);
    tokio::select! {
        () = to_screen => {}
        () = &mut to_viewer => return End::Screen,
    }
    // The daemon ends its side when it has taken all: a line that was typed just before the end is whole.
    let _late = timeout(LAST, to_viewer).await;
    End::Viewer
}

/// Private folder of this user (mode 0700), removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> io::Result<Self> {
        let base = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let path = base.join(format!("vmmctl-{}", uuid::Uuid::new_v4()));
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(folder: &Path) {
    if let Err(error) = std::fs::remove_dir_all(folder) {
        eprintln!("vmmctl: removing {}: {error}", folder.display());
    }
}

fn failed(what: &str, error: &io::Error) -> Failure {
    Failure::new(Code::Other, format!("{what}: {error}"))
}
