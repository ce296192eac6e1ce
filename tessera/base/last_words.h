// What a program says when it ends because nobody caught an exception.
#pragma once

#include <string>
#include <string_view>

namespace c10 {
class Error;
}

namespace tessera {

/// Called with the first Error that is made, and by init(). From then on, an Error of Tessera or of libtorch that nobody catches ends the
/// process with status 1 and "PROGRAM: message" on standard error, instead of "terminate called" and a core. With libtorch's come the unit
/// that this thread has used last, and the calls only where TORCH_SHOW_CPP_STACKTRACES=1 asks for them. Other exceptions go to the handler
/// that the program had. All of them are recorded for the launcher. Only the first call does something.
void say_last_words();

/// Where this thread is: "backward" of unit "layers.3".
void note_place(std::string_view phase, std::string_view unit);

/// The message of an error of libtorch without the calls that led to it, unless TORCH_SHOW_CPP_STACKTRACES=1 asks for them.
std::string message_without_calls(const c10::Error& error);

}  // namespace tessera
